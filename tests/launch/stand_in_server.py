"""Waits to be ended, or fails at once."""

import sys

from tests.launch.stand_in import StandIn

server = StandIn('server')
print('output of a server', flush=True)
if server.behaviour.get('fails'):
    sys.exit(1)
server.start_descendants()
sys.exit(server.wait())
