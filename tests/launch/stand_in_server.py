"""Registers and waits to be ended, or fails at once."""

import os
import sys

from areal_jax.registry import Registration
from areal_jax.rollout.servers.server_entries import describe_server
from tests.launch.stand_in import StandIn

server = StandIn('server')
print('output of a server', flush=True)
if server.behaviour.get('fails'):
    sys.exit(server.behaviour.get('code', 1))
if server.behaviour.get('hangs'):
    sys.exit(server.wait())
registration = Registration(server.workdir, describe_server(str(os.getpid()), 'http://127.0.0.1:1', 'own'))
server.start_descendants()
sys.exit(server.wait(registration.beat))
