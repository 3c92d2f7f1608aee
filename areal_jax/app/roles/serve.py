"""Serves a model: one engine of this process, its service, the front for the requests, and the weights it loads."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import signal
import socket
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

from ml_collections import config_dict

from areal_jax.app.evaluate.evaluation_config import adapt_config, read_version
from areal_jax.app.model.model import Model, build_model, describe_model
from areal_jax.app.model.text_model import describe_loading, describe_source
from areal_jax.app.parts.channels import number_readers
from areal_jax.app.parts.compilations import use_compilation_cache
from areal_jax.app.parts.engines import build_serving_backend, describe_caches, place_of
from areal_jax.app.parts.host import build_clock
from areal_jax.app.parts.workflow_builder import build_parser, require_notation
from areal_jax.app.process.ending import StopRequests
from areal_jax.app.process.setup import require_extras
from areal_jax.app.roles.server_front import HTTP, FrontKind, FrontParts
from areal_jax.config import TrackedConfig, validate_evaluation
from areal_jax.config.addresses import name_hosts
from areal_jax.config.cluster import parse_engines
from areal_jax.config.fields import ConfigError, Purpose
from areal_jax.config.xla_flags import FIELD as XLA_FLAGS
from areal_jax.control.clocks.real import RealClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.files import Announce
from areal_jax.formats.hf_config import read_hf_config
from areal_jax.installation import __version__
from areal_jax.learning import weights as trees
from areal_jax.learning.weights import require_finite_shards
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import FAMILIES
from areal_jax.models.weights import leaf_dtype
from areal_jax.protocols import Event
from areal_jax.publication.carriers.files_carrier import FilesReceiver, read_delta
from areal_jax.publication.carriers.stream_receiver import parse_version_name
from areal_jax.publication.files_channel import find_version, load_version
from areal_jax.publication.manifest import by_path
from areal_jax.publication.record import Held, RecordReceiver
from areal_jax.publication.record_channel import WeightsReader
from areal_jax.publication.versions import parse_delta, parse_version
from areal_jax.registry import FencedError, Heartbeat
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend, JaxScoring, PreparedWeights
from areal_jax.rollout.http.server.bridge import Texts
from areal_jax.rollout.http.server.limits import Limits, raise_limit
from areal_jax.rollout.http.server.replies import Callers
from areal_jax.rollout.http.server.state import Facts
from areal_jax.rollout.http.server.thread import ServedModel, describe_url, reachable
from areal_jax.rollout.http.service import FIRST_LABEL, Action, GenerationService, UpdateError, WeightsDirectory
from areal_jax.rollout.http.wire.encoding import LARGEST_VERSION, read_integer
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.rollout.scoring import Scorer
from areal_jax.rollout.servers.keeper import state_facts
from areal_jax.rollout.servers.server_entries import describe_facts
from areal_jax.rollout.stream import IN_A_SERVER
from areal_jax.sharding.placement import Place, move_to
from areal_jax.sharding.rules import allocate_engines, describe_hardware
from areal_jax.telemetry.progress import StartProgress
from areal_jax.types import PublishedWeights, Weights

OpenReceiver: TypeAlias = Callable[[str], RecordReceiver]  # from an address


class VersionLoader:
    """Called with a WeightsDirectory, returns its weights for the backend and sets its digest.

    A path `v000007.delta` opens a reader of its directory, which reads later versions there as changes. An address of a
    version in shared memory or behind a socket does the same. Other paths are loaded whole.

    Args:
      open_receiver: opens an address, in a server of a run; None = no version is taken from an address.
    """

    def __init__(
        self, backend: JaxDecodeBackend, decoder: Decoder, place: Place, open_receiver: OpenReceiver | None = None
    ):
        self._backend, self._decoder, self._place, self._open = backend, decoder, place, open_receiver
        self._readers: dict[pathlib.Path, WeightsReader] = {}  # by directory of versions
        self._carried: tuple[str, WeightsReader] | None = None  # (address, its reader): one start of a learner

    def __call__(self, published: PublishedWeights) -> Weights:
        """Raises the errors of `load_directory`, and UpdateError for a delta in another dtype than the server's."""
        directory = published.handle
        assert isinstance(directory, WeightsDirectory)
        if (named := parse_version_name(directory.path)) is not None:
            return self._read_address(directory, *named)
        path = pathlib.Path(directory.path)
        delta, whole = parse_delta(path), parse_version(path)
        if delta is not None:
            header = read_delta(path, delta).header
            self._require_dtype(path, {name: leaf.dtype for name, leaf in header.leaves.items()})
            return self._read(directory, delta, header.manifest_hash)
        if whole is not None and path.parent in self._readers:
            return self._read(directory, whole, find_version(path, whole).manifest_hash)
        return load_directory(published, decoder=self._decoder, place=self._place, dtype=self._backend.dtype.name)

    def _read(self, directory: WeightsDirectory, version: int, manifest_hash: str) -> Weights:
        folder, transposed = pathlib.Path(directory.path).parent, self._backend.find_transposed()
        if folder not in self._readers:
            receiver = FilesReceiver(folder, self._decoder.config, f'{socket.gethostname()}-{os.getpid()}')
            self._readers[folder] = WeightsReader(receiver, self._place, transposed=transposed or ())
        return self._take(self._readers[folder], directory, version, manifest_hash)

    def _read_address(self, directory: WeightsDirectory, address: str, held: Held) -> Weights:
        if self._open is None:
            raise UpdateError(
                f'{directory.path} is a version of a run whose channel this server does not read: start it with the '
                '--workdir and the publication.channel of the run'
            )
        if self._carried is None or self._carried[0] != address:
            self._close_carried()
            transposed = self._backend.find_transposed()
            self._carried = address, WeightsReader(self._open(address), self._place, transposed=transposed or ())
        return self._take(self._carried[1], directory, held.version, held.manifest_hash)

    def _close_carried(self) -> None:
        """Closes the reader of an earlier start of the learner, whose sender is gone."""
        if self._carried is not None:
            self._carried[1].close()
            self._carried = None

    def _take(self, reader: WeightsReader, directory: WeightsDirectory, version: int, manifest_hash: str) -> Weights:
        weights, held = reader.receive(version, manifest_hash)
        self._require_dtype(directory.path, {name: str(leaf.dtype) for name, leaf in by_path(weights).items()})
        directory.digest = held.manifest_hash
        return weights if self._backend.find_transposed() is None else PreparedWeights(weights)

    def _require_dtype(self, path: str | pathlib.Path, dtypes: Mapping[str, str]) -> None:
        """Raises UpdateError for another dtype than this server's; `dtypes` are of the leaves, by their paths."""
        own = self._backend.dtype.name
        for leaf, dtype in dtypes.items():
            if dtype != leaf_dtype(leaf, own):
                raise UpdateError(
                    f'{path} is in {dtype}, and this server decodes in {own}: start it with publication.dtype='
                    f'{dtype!r}, or publish with publication.delta=False'
                )


def load_directory(published: PublishedWeights, *, decoder: Decoder, place: Place, dtype: str) -> Weights:
    """Loads the weights of a WeightsDirectory, checked against its manifest if it has one; sets its digest.

    Raises UpdateError for a model of another shape, PublicationError for incomplete files, NonFiniteError for weights
    with NaN or infinity.
    """
    directory = published.handle
    assert isinstance(directory, WeightsDirectory)
    path = pathlib.Path(directory.path)
    named = read_integer(directory.label, LARGEST_VERSION)
    found = find_version(path, (parse_version(path) or 0) if named is None else named)
    _require_shape(path, decoder)
    params = trees.cast(load_version(found, decoder.config, place, verify=True), dtype)
    require_finite_shards(params, f'{path} as {dtype}', 'get the files again, or load other weights')
    directory.digest = found.manifest_hash
    return params


def _require_shape(path: pathlib.Path, decoder: Decoder) -> None:
    theirs = read_hf_config(path)
    for field in dataclasses.fields(theirs):
        one, other = getattr(decoder.config, field.name), getattr(theirs, field.name)
        if one != other and field.name != 'context_tokens':  # it is no property of the weights
            raise UpdateError(
                f'{path} is a model with {field.name}={other!r}, and this server holds one with {one!r}: start a '
                'server with it'
            )


_FIRST_VERSION = 0  # of the initial weights, inside this process
_NOTATION = 'server.notation'


def serve_model(
    config: config_dict.ConfigDict,
    listener: socket.socket,
    *,
    model: str | None = None,
    api_key: str = '',
    host: str = '',
    overrides: Collection[str] = (),
    interrupts: StopRequests | None = None,
    heartbeat: Heartbeat | None = None,
    front: FrontKind = HTTP,
) -> None:
    """Serves until a stop is requested; then open answers have server.drain_timeout_s to end.

    Args:
      config: as an experiment file gives it, overrides applied: sections rollout, server and cluster.engines.
      listener: the bound socket.
      model: see evaluate.evaluate_model; None = the model that config.model names.
      api_key: clients must send it; '' = no key.
      host: a name or address by which clients without a key may call this server, in addition to server.hosts.
      heartbeat: of a server of a run, which is in the run's registry from its start, and adds its address when it
        serves. The config is the run's, of which a server reads a part; `model` may be a version that the run has
        published.
      front: the protocol.

    Raises UserError for errors that the user can fix.
    """
    adapted = adapt_server_config(config, model, overrides, of_run=heartbeat is not None)
    validate_evaluation(adapted)
    require_extras(adapted)
    require_notation(adapted.server.notation, _NOTATION)
    version = None if heartbeat is None or model is None else read_published(model)
    with contextlib.ExitStack() as parts:
        tracked = TrackedConfig(adapted, () if heartbeat else overrides, purpose=Purpose.SERVING)
        tracked.note_used([XLA_FLAGS])  # by the command, before jax
        described = TrackedConfig(config) if version is not None else None
        open_receiver = number_readers(tracked, None if heartbeat is None else heartbeat.workdir)
        source = _Source(version, described)
        callers = Callers(api_key, name_hosts((host, *tracked.server.hosts)))
        server = _Server(tracked, source, listener, callers, interrupts, front, open_receiver, parts)
        server.run(heartbeat)


def adapt_server_config(
    config: config_dict.ConfigDict, model: str | None, overrides: Collection[str], *, of_run: bool
) -> config_dict.ConfigDict:
    """Returns the config of one server: one engine under the real clock, with the model of the command line.

    Raises ConfigError for settings that a server cannot have; `of_run`: fields that only the trainer uses may be set.
    """
    adapted = adapt_config(config, model, () if of_run else overrides)
    engines = parse_engines(adapted.cluster.engines)
    if engines.count != 1:
        if not of_run:
            raise ConfigError(
                f'cluster.engines={adapted.cluster.engines!r} asks for {engines.count} engines, and a server has one: '
                'start one server for each'
            )
        adapted.cluster.engines = str(engines.select(0))
    if adapted.run.clock != 'real':
        raise ConfigError(f'run.clock={adapted.run.clock!r}: a server answers in real time; use run.clock=real')
    adapted.evaluation.every = adapted.evaluation.engines = 0
    adapted.evaluation.problems = max(1, adapted.evaluation.problems)
    return adapted


def read_published(model: str) -> PublishedWeights | None:
    """Returns the version of the files channel that a path names; None for any other model."""
    version = parse_version(pathlib.Path(model))
    return None if version is None else find_version(model, version)


@dataclasses.dataclass(frozen=True)
class _Source:
    """The source of the weights: a published version, with the config that has its tokenizer, or config.model."""

    published: PublishedWeights | None
    described: TrackedConfig | None

    def load(self, config: TrackedConfig, announce: Announce) -> Model:
        if self.published is None or self.described is None:
            return build_model(config, announce)
        model = describe_model(self.described)
        model.tokenizer.fits(model.decoder.config.vocab_size)
        model.params = load_version(self.published, model.decoder.config, verify=True)
        model.source = pathlib.Path(self.published.handle)
        return model

    def label(self, model: Model) -> str:
        version = self.published.version if self.published is not None else read_version(model.source)
        return FIRST_LABEL if version is None else str(version)

    @property
    def digest(self) -> str:
        return '' if self.published is None else self.published.manifest_hash


class _Server:
    """The parts of one server. The constructor builds and compiles; `run` serves."""

    def __init__(
        self,
        config: TrackedConfig,
        source: _Source,
        listener: socket.socket,
        callers: Callers,
        interrupts: StopRequests | None,
        front: FrontKind,
        open_receiver: OpenReceiver | None,
        parts: contextlib.ExitStack,
    ):
        self._config, self._interrupts, self._kind = config, interrupts, front
        self._open_receiver = open_receiver
        self._start = StartProgress(config.telemetry.progress, check=interrupts.check if interrupts else lambda: None)
        parts.callback(self._start.end)
        parts.enter_context(use_compilation_cache(config))
        self._start.begin(describe_loading(config))
        self._model = source.load(config, self._start.count_bytes)
        self._parser = build_parser(config.server.notation, _NOTATION, self._model.tokenizer)
        self.log = EventLog(keeps=False)
        self.clock = build_clock(config, self.log, 0.0)
        self.supervisor = Supervisor(self.clock)
        self.engine = self._build_engine(self._model)
        self.service = GenerationService(
            self.engine, self.clock, self.supervisor,
            label=source.label(self._model), model_path=config.model.path, digest=source.digest,
            scorer=Scorer(self.engine, JaxScoring(self._backend), self.clock),
        )  # fmt: skip
        self.front = front.build(self._describe_front(listener, callers))
        self._heartbeat: Heartbeat | None = None
        self._fenced: FencedError | None = None  # another process has taken the name
        self._drain_s = config.server.drain_timeout_s
        self._facts = state_facts(config.rollout, config.publication.dtype, 'processed', self._hardware)
        config.require_all_read()
        self._warm_up()

    def run(self, heartbeat: Heartbeat | None) -> None:
        stop = self.clock.event('stop requested')
        request = lambda number: self.clock.post_signal(number, stop)
        then, interrupts = 'answering what is under way', self._interrupts
        if isinstance(self.clock, RealClock):
            self.clock.restart()
        with contextlib.ExitStack() as serving:
            if interrupts is not None:
                serving.enter_context(interrupts.deferred(request, then, self.clock.abandon))
            if heartbeat is not None:
                self._served.facts.holder = heartbeat.entry.holder
            serving.enter_context(self.front)
            if heartbeat is not None:
                self._announce(heartbeat, stop)
            print(f'serving {self._name} on {self.url}', flush=True)
            self.clock.execute(self.supervisor.run(self._program(stop)))
        if self._fenced is not None:
            raise self._fenced

    def _announce(self, heartbeat: Heartbeat, stop: Event) -> None:
        """Registers the address of this server; from now on it drains and ends if another process takes its name."""

        def end(error: FencedError) -> None:
            self._fenced = error
            self.clock.post_signal(signal.SIGTERM, stop)

        heartbeat.on_fenced = end
        heartbeat.update(address=reachable(self.url), kind=self._kind.client.name, details=describe_facts(self._facts))
        self._heartbeat = heartbeat

    async def _program(self, stop: Event) -> None:
        self.engine.start(self.supervisor)
        self.supervisor.start('service', self.service.serve())
        await self.clock.wait(stop)
        self.front.refuse_new()
        if self._heartbeat is not None:
            self._heartbeat.note_leaving()
        drained = self.clock.event('no request is open')

        async def drain() -> None:
            await self.service.drain()
            drained.set()

        self.supervisor.start('drain', drain())
        await self.clock.wait(drained, self._drain_s)

    # Building.

    def _build_engine(self, model: Model) -> LocalEngine:
        config = self._config
        allocation = allocate_engines(parse_engines(config.cluster.engines))
        devices = allocation.engines[0]
        place, dtype = place_of(config, model.decoder, devices), config.publication.dtype
        self._hardware = describe_hardware(devices)
        self._backend = build_serving_backend(config, model.decoder, devices)
        self._start.begin(f'building the engine; {describe_caches({devices: self._backend})}')
        params = move_to(trees.cast(model.params, dtype), place)
        model.params = None
        require_finite_shards(params, *describe_source(config, model.source))
        return LocalEngine(
            0, self._backend, self.clock, self.log,
            receive=VersionLoader(self._backend, model.decoder, place, self._open_receiver),
            version=_FIRST_VERSION, params=params, rollout=config.rollout,
            token_bytes=model.tokenizer.token_bytes, failure=IN_A_SERVER,
            on_failed_dispatch=traceback.print_exception if self._kind.survives else None,
        )  # fmt: skip

    def _describe_front(self, listener: socket.socket, callers: Callers) -> FrontParts:
        config, model = self._config, self._model
        self.url, self._name = describe_url(listener), _name_model(model, config)
        shape = model.decoder.config
        architecture = FAMILIES[shape.family].architecture
        facts = Facts(self._name, config.model.path, architecture, __version__, int(time.time()))
        served = self._served = ServedModel(
            Texts(model.tokenizer), config.rollout.context_tokens, shape.vocab_size, config.run.seed, facts,
            config.server.required, self._parser,
            tuple(column.name for column in shape.columns) if config.rollout.record_routes else (),
        )  # fmt: skip
        limits = Limits(
            body_bytes=config.server.max_body_bytes,
            body_s=config.server.body_timeout_s,
            requests=config.server.max_requests,
            streams=config.server.max_streams,
            scored_tokens=config.server.max_scored_tokens,
            request_s=config.server.request_timeout_s,
            share=config.server.max_share,
            connections=config.server.max_connections,
            header_s=config.server.header_timeout_s,
            write_s=config.server.write_timeout_s,
        )
        raise_limit()
        return FrontParts(
            self.service.inbox, served, listener, limits, config.rollout.decode_steps, callers, self._note_death
        )

    def _note_death(self, error: BaseException) -> None:
        """Ends the program with the error; called on a thread of the front."""

        async def fail(service: GenerationService) -> None:
            raise RuntimeError('a thread that takes requests has ended') from error

        self.service.inbox.put(Action('front', fail, lambda result, refused: None))

    def _warm_up(self) -> None:
        began = time.monotonic()
        self._start.begin('compiling what generates:')
        programs = self._backend.warm_up(self.engine.params, self._start.count_programs)
        self._start.end()
        print(f'compiled {programs} programs in {time.monotonic() - began:.0f} s', flush=True)


def _name_model(model: Model, config: TrackedConfig) -> str:
    return 'random' if model.source is None else pathlib.PurePath(config.model.path.rstrip('/')).name
