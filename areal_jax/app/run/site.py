"""Where the learner of a run is, and what its loop needs of that place. Nothing here imports jax.

own_site.py: in this process. remote_site.py: in other processes.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypedDict

import numpy as np

from areal_jax.app.parts import part_settings as build
from areal_jax.app.parts.energy_builder import UsedDevices
from areal_jax.app.run.observer import Compilations
from areal_jax.app.run.run_context import Checkpoint
from areal_jax.app.workdir.environment import Environment
from areal_jax.app.workdir.provenance import Hardware
from areal_jax.checkpoint.store import Follower
from areal_jax.config import TrackedConfig
from areal_jax.config.cluster import DeviceSplit
from areal_jax.control.clocks.loop import LoopClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.lock_step import VersionRing
from areal_jax.control.reallocation import DeviceSite
from areal_jax.control.supervisor import Supervisor
from areal_jax.protocols import Channel, Learner
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.rollout.pool import Pool
from areal_jax.telemetry.devices import DeviceRates
from areal_jax.text.tokenizer import Tokenizer
from areal_jax.types import PublishedWeights, TokenArrays, TrajectoryGroup, Tree


class ModelText(Protocol):
    """What a run needs of a model outside its learner."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def source(self) -> pathlib.Path | None:
        """File or directory of the weights; None = drawn."""
        ...


class RunLearner(Learner, Protocol):
    """The learner of a whole run, wherever its processes are."""

    @property
    def followers(self) -> Sequence[Follower]:
        """Processes that write shards of a checkpoint of their own."""
        ...

    def warm_up(self) -> int:
        """Compiles every program; returns their number."""
        ...

    def update_tokens(self, groups: Sequence[TrajectoryGroup]) -> int:
        """Tokens that an update of these groups reads."""
        ...

    def read_tokens(self, draws: Sequence[int]) -> Sequence[Sequence[TokenArrays]]:
        """What the last update knew of the tokens of these draws, before `publish`; see SpmdLearner."""
        ...

    def score(self, version: int, prompt_tokens: np.ndarray, answer_tokens: np.ndarray) -> np.ndarray | None:
        """float32 [A]: log-probs of an answer under the weights of a version; None where it has others by now."""
        ...


class EngineFacts(TypedDict):
    """The fields of RunFacts that say what engines and learner compute on."""

    kv_cache_bytes: int | None
    memory_parts: Mapping[str, int]
    lanes_own_devices: bool
    devices: Mapping[str, Any]


class LocalRollout(NamedTuple):
    """Engines of this process, and the pool that routes to them."""

    engines: Sequence[LocalEngine]
    pool: Pool
    moves: DeviceSite | None = None  # who moves devices; None: they stay


class Site(Protocol):
    """Where the learner is. The methods are called in this order; later ones use what earlier ones have built."""

    compilations: Compilations

    def load_model(self) -> ModelText: ...

    def build_learner(self, checkpoint: Checkpoint | None) -> RunLearner:
        """With the checkpoint's weights or else the model's."""
        ...

    def trace(self) -> Learner:
        """The learner that was built, or one that traces the updates that telemetry.profile_steps names."""
        ...

    def find_hardware(self) -> Hardware:
        """Where the run computes."""
        ...

    def export(self, weights: Tree, digest: str) -> None:
        """Writes WORKDIR/export. The results of the run are on the disk, so that a failure is kept for the end."""
        ...

    def complete_export(self) -> None:
        """Writes the export of a finished run where it is missing, after a kill or on a disk that was full."""
        ...


class EngineSite(Protocol):
    """A site where engines decode in the process of the learner."""

    def restore_ring(self, ring: VersionRing, saved: Mapping[str, Tree]) -> None:
        """Fills the ring with the weights of earlier versions out of a checkpoint, by version."""
        ...

    def build_rollout(
        self, published: PublishedWeights, clock: LoopClock, log: EventLog, supervisor: Supervisor
    ) -> LocalRollout: ...

    @property
    def split(self) -> DeviceSplit | None:
        """Of the devices that move; None where they stay."""
        ...

    def note_split(self, split: DeviceSplit) -> DeviceRates:
        """Devices were moved: the rates per device from now on."""
        ...

    def copy_version(self, published: PublishedWeights) -> Tree:
        """Weights of an earlier version for a checkpoint, in host memory."""
        ...


class LoopSite(Site, Protocol):
    """A site whose learner is trained by the asynchronous loop."""

    engine_site: EngineSite | None  # None: engines decode in other processes
    awaited_engines: int  # engines in other processes that must serve before the run starts: for training,
    awaited_beside: int  # and for evaluation

    def find_rates(self) -> DeviceRates: ...

    def find_devices(self) -> UsedDevices | None:
        """The devices of learner and engines, after `find_rates`; None where some are in other processes."""
        ...

    def build_channel(self) -> Channel: ...

    def compile(self, engines: Sequence[LocalEngine], version: int) -> int:
        """Compiles what the run needs at `version`; returns the number of programs."""
        ...

    async def finish_compiling(self, clock: LoopClock) -> None:
        """Compiles what was not yet needed."""
        ...

    def find_final_weights(self) -> tuple[Tree, str]:
        """Those after the last update, as engines have them, and the digest that the report gives them."""
        ...

    def read_environment(self) -> Environment:
        """What the bits of the run depend on."""
        ...

    def describe_engines(self) -> EngineFacts: ...

    def describe_simulation(self) -> str:
        """What is simulated, in words; '' = nothing."""
        ...

    def close_learner(self) -> None:
        """After the report of a finished run."""
        ...


def find_split(config: TrackedConfig, checkpoint: Checkpoint | None) -> DeviceSplit | None:
    """The one that a run begins with, or goes on with; None where devices do not move."""
    if not build.moves_devices(config):
        return None
    saved = None if checkpoint is None else checkpoint.state.get('reallocation')
    return build.find_initial_split(config) if saved is None else DeviceSplit(saved['learner'], saved['engines'])
