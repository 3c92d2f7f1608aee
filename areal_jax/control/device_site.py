"""The interface of what owns the devices that reallocation.py moves: app/parts/engines.py implements it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from areal_jax.config.cluster import DeviceSplit
from areal_jax.protocols import RolloutEngine
from areal_jax.types import PublishedWeights


class DeviceSite(Protocol):
    """Who owns the devices of a run that control/reallocation.py moves between learner and engines.

    What is blocking touches nothing that another lane reads.
    """

    def engines_of(self, split: DeviceSplit) -> Mapping[str, Sequence[str]]:
        """The names of their devices by engine, in the order of the engines. Equal devices: the engine stays."""
        ...

    def prepare(self, split: DeviceSplit) -> None:
        """Compiles what the split needs; blocking, on the lane `prepare`, while the run goes on. Nothing twice."""
        ...

    def move_learner(self, split: DeviceSplit) -> None:
        """The learner goes on with the devices of the split; blocking, on its lane, between two updates."""
        ...

    def build_engine(self, name: str, split: DeviceSplit, published: PublishedWeights) -> RolloutEngine:
        """An engine of the split with these weights, not started; blocking, on the lane where it fetches weights."""
        ...

    def start_engine(self, engine: RolloutEngine) -> None:
        """An engine of `build_engine` serves from now on."""
        ...

    def stop_engine(self, engine: RolloutEngine) -> None:
        """Ends an engine that has left the pool, and lets its weights and its cache go."""
        ...
