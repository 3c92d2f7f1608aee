"""Waits to be ended."""

import sys

from tests.launch.stand_in import StandIn

trainer = StandIn('trainer')
trainer.start_descendants()
sys.exit(trainer.wait())
