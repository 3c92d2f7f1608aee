"""launch.local with stand-ins for its programs, and with short pauses."""

import os
import sys

from areal_jax.app.roles import own_server
from areal_jax.workers.descendants import list_descendants
from launch import heartbeats, local, programs, roles, supervisor

local.TRAINER, own_server.PROGRAM = 'tests.launch.stand_in_trainer', 'tests.launch.stand_in_server'
roles.ROLE = 'tests.launch.stand_in_role'
programs.LONGEST_PAUSE_S, supervisor.STOP_S = 0.1, 1.0
roles.LONGEST_PAUSE_S, roles.STOP_S, roles.MOST_RESTARTS = 0.1, 1.0, 2
roles.NOTICE_S = roles.KILLED_NOTICE_S = 0.2
heartbeats.PATIENCE_S, heartbeats.LOOK_S = 1.0, 0.1
heartbeats.REGISTER_S = float(os.environ.get('STAND_IN_REGISTER_S', '60'))
try:
    local.run()
finally:
    print(f'jax: {"jax" in sys.modules}, processes left: {len(list_descendants(os.getpid()))}')
