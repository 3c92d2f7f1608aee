"""launch.local with stand-ins for its programs, and with short pauses."""

import sys

from launch import local, programs, supervisor

local.TRAINER, local.SERVER = 'tests.launch.stand_in_trainer', 'tests.launch.stand_in_server'
programs._LONGEST_PAUSE_S, supervisor._STOP_S = 0.1, 1.0
try:
    local.run()
finally:
    print('jax' in sys.modules)
