"""Registers as a role of a run and waits to be ended, or ends at once with a code."""

import os
import sys

from areal_jax.registry import Entry, Registration
from tests.launch.stand_in import StandIn

flags = dict(word.removeprefix('--').split('=', 1) for word in sys.argv[1:] if '=' in word)
role = StandIn(f'{flags["role"]}-{flags["index"]}')
role.note('flags', os.environ.get('XLA_FLAGS', '').replace(' ', '|'))
print('first line of a role', 'last line of a role', sep='\n', flush=True)
if 'code' in role.behaviour:
    sys.exit(role.behaviour['code'])
if role.behaviour.get('hangs'):
    sys.exit(role.wait())
registration = Registration(role.workdir, Entry(role.name, 0, '', role=flags['role'], index=int(flags['index'])))
role.start_descendants()
sys.exit(role.wait(registration.beat))
