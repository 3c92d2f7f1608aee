"""The run of the asynchronous loop whose learner and engines are in other processes: a controller. Imports no jax.

Weights and optimizer state stay with the learner processes: they write checkpoints and versions.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from ml_collections import config_dict

from areal_jax.app.environment import Environment, read_environment
from areal_jax.app.finished_export import export_in_process, holds_export
from areal_jax.app.loop_parts import EngineFacts
from areal_jax.app.loop_run import LoopRun
from areal_jax.app.provenance import Hardware, describe_hardware
from areal_jax.app.roles import RoleProcess, keep_name, require_roles
from areal_jax.app.run import Checkpoint
from areal_jax.app.text_model import describe_source, describe_text_model, find_source, require_rules_of_origin
from areal_jax.app.workdir import CHECKPOINTS, Report, describe_unexported, note_weights
from areal_jax.checkpoint.store import CheckpointError
from areal_jax.config.cluster import list_roles, parse_learner
from areal_jax.config.declarations import SECTIONS
from areal_jax.control.schedule import VersionRing
from areal_jax.distributed.attempt import learner_name, read_attempt
from areal_jax.distributed.handshake import Hello, connect, digest_config
from areal_jax.distributed.key import key_path, load_key
from areal_jax.distributed.messages import RemoteUserError, RemoteValueError
from areal_jax.distributed.peers import Peers
from areal_jax.distributed.remote_learner import RemoteChannel, RemoteLearner
from areal_jax.errors import UserError
from areal_jax.protocols import Learner
from areal_jax.registry.entries import Entry
from areal_jax.registry.presence import await_living
from areal_jax.rollout.pool import Pool
from areal_jax.tasks.tokenizer import Tokenizer
from areal_jax.telemetry.devices import DeviceRates, peak_flops
from areal_jax.types import PublishedWeights, Tree

_OF_LEARNER = ('params', 'optimizer')  # names in the arrays of a checkpoint
# sections of which the learner processes read what they need
_READ_ELSEWHERE = (
    *('model', 'learner', 'lora', 'loss', 'optimizer', 'cluster', 'distributed', 'publication', 'diagnostics'),
)


@dataclasses.dataclass(frozen=True)
class RemoteModel:
    """What this process knows of the model: loop_run.ModelText."""

    tokenizer: Tokenizer
    source: pathlib.Path | None
    vocab_size: int


class NoCompilations:
    """observer.Compilations of a process that compiles nothing."""

    count = 0

    def reset(self) -> None: ...


class ControllerRun(LoopRun):
    """See LoopRun. It always goes on from what is in the workdir."""

    learner: RemoteLearner

    def __init__(self, config: config_dict.ConfigDict, process: RoleProcess, **settings: Any):
        """`settings`: see Run."""
        self._process, self._given = process, config
        self._learners: dict[str, Entry] = {}
        counts = {entry.role: entry.count for entry in list_roles(config)}
        self._awaited_beside = config.evaluation.engines
        self._awaited_engines = counts.get('engine', 0) - config.evaluation.engines
        super().__init__(config, process.workdir, **settings)

    def _require_startable(self, config: config_dict.ConfigDict) -> None:
        require_rules_of_origin(config)
        require_roles(config)

    def _print_warnings(self, config: config_dict.ConfigDict) -> None:
        """Learner process 0 does."""

    def _use_compilation_cache(self) -> None:
        for section in _READ_ELSEWHERE:
            for field in SECTIONS[section]:
                getattr(getattr(self.config, section), field)
        _ = self.config.run.compilation_cache, self.config.run.export_every

    def _count_compilations(self) -> NoCompilations:
        return NoCompilations()

    def _open_workdir(self) -> None:
        """The other roles wait for the entry of this one: config.json is there when it appears."""
        super()._open_workdir()
        self._parts.enter_context(keep_name(self._process, self._given))

    # The model and the learner.

    def _load_model(self) -> RemoteModel:
        self._start.begin('reading the tokenizer')
        text, source = describe_text_model(self.config), find_source(self.config)
        text.tokenizer.fits(text.shape.vocab_size)
        note_weights(self.workdir, source, resume=self._resume)
        self._exports = self.config.run.export
        self._export_dtype = self.config.run.export_dtype if self._exports else ''
        self._model = RemoteModel(text.tokenizer, source, text.shape.vocab_size)
        return self._model

    def _build_learner(self, model: RemoteModel, checkpoint: Checkpoint | None) -> None:
        """Connects to the learner processes. Where one is lost this process ends with ExitCode.STOPPED."""
        self._start.begin('waiting for the learner')
        deadline_s = self.config.distributed.command_deadline_s
        self._learners = self._find_learners(deadline_s)
        key, config = load_key(key_path(self.workdir)), digest_config(self.config.as_dict())
        hello = Hello('the controller', config)
        connections = [
            (f'learner {entry.index}', connect(entry.address, key, hello, deadline_s).connection)
            for entry in self._learners.values()
        ]
        self._peers = Peers(connections, deadline_s=deadline_s)
        self.learner = RemoteLearner(self._peers)
        self.learner.require_finite(*describe_source(self.config, model.source))
        if checkpoint is None:
            return
        try:
            self.learner.restore({name: checkpoint.arrays[name] for name in _OF_LEARNER})
        except RemoteUserError as error:
            raise CheckpointError(f'{self.workdir / CHECKPOINTS}: {error}') from error
        except RemoteValueError as error:
            raise CheckpointError(f'{self.workdir / CHECKPOINTS} is of another model: {error}') from error

    def _find_learners(self, deadline_s: float) -> dict[str, Entry]:
        """Those of the newest attempt, by name in the order of their indices, when all are built."""
        count = parse_learner(self.config.cluster.learner).processes

        def are_ready(found: Mapping[str, Entry]) -> bool:
            attempt = read_attempt(self.workdir)
            holders = tuple(found[learner_name(index)].holder for index in range(count))
            return attempt is not None and attempt.members == holders and all(e.address for e in found.values())

        return await_living(
            self.workdir,
            [learner_name(index) for index in range(count)],
            deadline_s,
            what=f'{count} learner processes to be built',
            fix='start them with the same config, and give all roles a --workdir that all their hosts share',
            accept=are_ready,
        )

    def _traced_learner(self) -> Learner:
        return self.learner

    # The loop.

    def _find_vocab_size(self) -> int:
        return self._model.vocab_size

    def _find_rates(self) -> DeviceRates:
        kind = str(next(iter(self._learners.values())).details.get('device_kind', ''))
        devices = parse_learner(self.config.cluster.learner).devices
        return DeviceRates(devices, 0, peak_flops(kind, self.config.learner.dtype))

    def _build_channel(self) -> RemoteChannel:
        directory = self.config.publication.directory or self.workdir / 'publication'
        return RemoteChannel(self._peers, pathlib.Path(directory))

    def _restore_ring(self, ring: VersionRing, saved: Mapping[str, Tree]) -> None:
        raise NotImplementedError('config.validate refuses a schedule in lock-step with servers')

    def _build_pool_here(self, published: PublishedWeights) -> Pool:
        raise NotImplementedError('require_roles refuses engines in this process')

    def _copy_version(self, published: PublishedWeights) -> Tree:
        raise NotImplementedError('config.validate refuses a schedule in lock-step with servers')

    # The report and the export.

    def _report(self) -> tuple[Report, Tree]:
        report = super()._report()
        self.learner.close()  # a run that ends in any other way leaves the learners to notice it, and to start again
        return report

    def _find_final_weights(self) -> None:
        """They are in the files of the last version and in the last checkpoint, not here."""

    def _digest(self, weights: Tree) -> str:
        """That of the exported weights, '' where none are."""
        if not self._exports:
            return ''
        try:
            return export_in_process(self.workdir, self.config.run.steps, self._export_dtype)
        except UserError as error:
            self._unsaved = self._unsaved or describe_unexported(error, self.workdir)
            return ''

    def _export(self, weights: Tree, digest: str) -> None:
        """Done by `_digest`."""

    def _complete_export(self) -> None:
        steps = self.config.run.steps
        if self._exports and not holds_export(self.workdir, steps):
            export_in_process(self.workdir, steps, self._export_dtype)
        self.learner.close()

    def _find_hardware(self) -> Hardware:
        """The cores of this machine, the devices of the learner."""
        return describe_hardware(self._list('devices'))

    def _read_environment(self) -> Environment:
        return read_environment(self._list('devices'))

    def _find_engine_facts(self) -> EngineFacts:
        platforms = {entry.details.get('platform') for entry in self._learners.values()}
        return {
            'kv_cache_bytes': None,
            'memory_parts': {},
            'lanes_own_devices': 'cpu' not in platforms,
            'devices': {'learner': self._list('device_ids'), 'engines': {}},
        }

    def _list(self, detail: str) -> list[Any]:
        return [value for entry in self._learners.values() for value in entry.details.get(detail, ())]
