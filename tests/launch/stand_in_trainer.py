"""Publishes a version and waits to be ended."""

import sys

from tests.launch.stand_in import StandIn

trainer = StandIn('trainer')
version = trainer.workdir / 'publication' / 'v000001'
if not trainer.behaviour.get('publishes_nothing'):
    version.mkdir(parents=True, exist_ok=True)
    (version / 'manifest.json').write_text('{}')
trainer.start_descendants()
sys.exit(trainer.wait())
