"""The devices of a simulated run, as they move between its learner and its engines. See control/reallocation.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from areal_jax.config.cluster import DeviceSplit
from areal_jax.config.splits import parse_split
from areal_jax.control.supervisor import Supervisor
from areal_jax.lanes import engine_lane
from areal_jax.protocols import RolloutEngine
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.types import PublishedWeights

BuildEngine = Callable[[str, Sequence[int], PublishedWeights], LocalEngine]


class SimulatedMoves:
    """Implements control.device_site.DeviceSite without devices.

    Args:
      move_learner: told of the split that the learner goes on with.
    """

    def __init__(self, build_engine: BuildEngine, move_learner: Callable[[DeviceSplit], None], supervisor: Supervisor):
        self._build_engine, self._supervisor, self.move_learner = build_engine, supervisor, move_learner

    def engines_of(self, split: DeviceSplit) -> dict[str, tuple[str, ...]]:
        return {name: tuple(map(str, devices)) for name, devices in place_engines(split).items()}

    def prepare(self, split: DeviceSplit) -> None:
        """There are no programs."""

    def build_engine(self, name: str, split: DeviceSplit, published: PublishedWeights) -> LocalEngine:
        return self._build_engine(name, place_engines(split)[name], published)

    def start_engine(self, engine: RolloutEngine) -> None:
        assert isinstance(engine, LocalEngine)
        engine.start(self._supervisor)

    def stop_engine(self, engine: RolloutEngine) -> None:
        assert isinstance(engine, LocalEngine)
        engine.stop()


def place_engines(split: DeviceSplit) -> dict[str, list[int]]:
    """Numbers of the devices by engine: the first engine has the last ones, so that engines stay where they can."""
    learner, engines = parse_split(split)
    total, each = learner.devices + engines.devices, engines.devices_each
    return {
        engine_lane(index): list(range(total - (index + 1) * each, total - index * each))
        for index in range(engines.count)
    }
