"""The capabilities of servers and channels, by kind: code asks an entry of these tables and never compares names.

`rollout.server` names a ServerKind, `publication.channel` a ChannelKind: one of this file, or FILE.py:FUNCTION, the
user's own function without parameters that returns one (tests/app/test_own_kinds.py has two). A kind refers to its
functions by name, 'package.module:function', so that the table imports neither jax nor a network library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

from areal_jax.config.fields import ConfigError
from areal_jax.plugins import is_own, load_function, raising_user_error

SERVER, CHANNEL = 'rollout.server', 'publication.channel'
SERVING = ('aiohttp', 'pydantic')  # modules of HTTP servers and of their clients
Reference: TypeAlias = str | Callable[..., Any]  # 'package.module:function', or the function


class ClientKind(NamedTuple):
    """A protocol that this project speaks with a server."""

    name: str  # `kind` of the entry in the registry; the address in rollout.urls is 'NAME+http://host:port'
    connect: Reference  # (rollout.http.clients.engine.ClientParts) -> ServerEngine
    has_address: bool = True  # may be used in rollout.urls
    packs_tied_head: bool = False  # on a CPU it keeps the first version's head if that is tied to the embedding


class Launch(NamedTuple):
    """The functions that start servers of a kind."""

    serve: Reference  # (config, process, interrupts) -> exit code: the process becomes an engine of a run in roles
    plan: Reference  # (config, workdir, number) -> the words after `python -m` for that server next to a trainer
    require: Reference | None = None  # () -> None; raises UserError if none can be started here
    require_version: Reference | None = None  # (on GPUs, settings of the nodes) -> None; UserError before a job
    prepare: Reference | None = None  # (config, workdir) -> None: writes the files that servers next to a trainer read
    front: Reference | None = None  # () -> app.roles.server_front.FrontKind of areal-serve; None: HTTP
    enter: Reference | None = None  # () -> None: continues under the interpreter that has the modules of its servers
    registers_at_start: bool = False  # its entry is in the registry while the server is still being built


class ServerKind(NamedTuple):
    """A source of answers."""

    name: str
    clients: tuple[ClientKind, ...] = ()  # protocols of its servers; none: engines decode in the learner's process
    launch: Launch | None = None  # None: no launcher of this project starts them
    takes_urls: bool = False  # its servers are in rollout.urls, not in the registry
    reads_deltas: bool = False  # a server, or the receiver next to it, takes deltas (publication.delta)
    has_own_engines: bool = False  # of this project, which use the decoding fields of the section rollout
    keeps_kv: bool = False  # of unfinished answers under new weights
    gives_sampling_logprobs: bool = False  # of the part of the softmax that top_k and top_p leave
    gives_routes: bool = False  # which experts each token has reached (rollout.record_routes)
    cuts_experts: bool = False  # over devices, as expert=K of cluster.engines asks
    leases_pauses: bool = False  # a pause ends by itself if the run is gone (rollout.pause_lease_s)
    limits_streams: bool = False  # its servers take server.max_streams answers at once, not rollout.slots
    modules: tuple[str, ...] = SERVING  # that the clients import
    reads_records: bool = False  # loads versions sent as records too, not only directories of files
    reads: tuple[str, ...] = ()  # fields or whole sections that its servers use, of sections without a dataclass

    @property
    def in_process(self) -> bool:
        """Whether engines decode in the process of the learner."""
        return not self.clients


class ChannelKind(NamedTuple):
    """A channel that carries weights from the learner to the engines."""

    name: str
    build: Reference  # (app.parts.channels.ChannelParts) -> protocols.Channel
    reaches_processes: bool  # servers can load its versions
    note: str = ''  # where its versions are, for the list of fields
    has_deltas: bool = False  # publication.delta
    shares_copy: bool = False  # engines on the device that holds a version decode with the channel's copy
    sends_records: bool = False  # versions are records (publication/record.py), from each learner process
    uses_network: bool = False  # versions travel through the network of the hosts, which a simulation prices

    @property
    def writes_files(self) -> bool:
        """Whether versions are directories that any server loads; each process of a learner writes its own part."""
        return self.reaches_processes and not self.sends_records


Kind = TypeVar('Kind', ServerKind, ChannelKind)

OWN_CLIENT = ClientKind('own', 'areal_jax.rollout.http.clients.own:connect', has_address=False)
VLLM_CLIENT = ClientKind('vllm', 'areal_jax.rollout.http.clients.vllm:connect', packs_tied_head=True)
JETSTREAM_CLIENT = ClientKind('jetstream', 'areal_jax.rollout.jetstream.client:connect', has_address=False)
SGLANG_CLIENT = ClientKind('sglang', 'areal_jax.rollout.http.clients.sglang:connect')

_READ_BY_SERVERS = (
    *('server', 'cluster.engines'),
    *('publication.channel', 'publication.reader_deadline_s', 'publication.record_deadline_s'),
)  # servers of this project
IN_PROCESS = ServerKind(
    'in_process',
    reads_deltas=True,
    reads_records=True,
    has_own_engines=True,
    keeps_kv=True,
    gives_sampling_logprobs=True,
    gives_routes=True,
    cuts_experts=True,
    modules=(),
)
OWN = ServerKind(
    'own',
    (OWN_CLIENT,),
    launch=Launch(
        'areal_jax.app.roles.own_server:serve_engine',
        'areal_jax.app.roles.own_server:plan_server',
        prepare='areal_jax.app.roles.own_server:write_config',
        registers_at_start=True,
    ),
    reads_deltas=True,
    has_own_engines=True,
    keeps_kv=True,
    gives_sampling_logprobs=True,
    gives_routes=True,
    cuts_experts=True,
    leases_pauses=True,
    limits_streams=True,
    reads_records=True,
    reads=_READ_BY_SERVERS,
)
JETSTREAM = ServerKind(
    'jetstream',
    (JETSTREAM_CLIENT,),
    launch=Launch(
        'areal_jax.app.roles.own_server:serve_jetstream',
        'areal_jax.app.roles.own_server:plan_server',
        require='areal_jax.app.roles.own_server:find_jetstream',
        prepare='areal_jax.app.roles.own_server:write_config',
        front='areal_jax.app.roles.own_server:describe_jetstream',
        enter='areal_jax.app.roles.own_server:enter_jetstream',
        registers_at_start=True,
    ),
    reads_deltas=True,
    reads_records=True,
    has_own_engines=True,
    keeps_kv=True,
    gives_sampling_logprobs=True,
    cuts_experts=True,
    leases_pauses=True,
    limits_streams=True,
    modules=('grpc', 'google.protobuf', 'pydantic'),
    reads=_READ_BY_SERVERS,
)
VLLM = ServerKind(
    'vllm',
    (VLLM_CLIENT,),
    launch=Launch(
        'areal_jax.app.roles.vllm_server:serve_engine',
        'areal_jax.app.roles.vllm_server:plan_server',
        require='areal_jax.app.roles.vllm_server:find_python',
        require_version='areal_jax.app.roles.vllm_server:require_version',
    ),
    reads_deltas=True,
    gives_routes=True,
    reads=('cluster.engines',),
)
SGLANG = ServerKind(
    'sglang',
    (SGLANG_CLIENT,),
    launch=Launch(
        'areal_jax.app.roles.sglang_server:serve_engine',
        'areal_jax.app.roles.sglang_server:plan_server',
        require='areal_jax.app.roles.sglang_server:find_python',
        require_version='areal_jax.app.roles.sglang_server:require_version',
    ),
    reads_deltas=True,
    gives_routes=True,
    reads=('cluster.engines',),
)
EXTERNAL = ServerKind('external', (SGLANG_CLIENT, VLLM_CLIENT), takes_urls=True, gives_routes=True)

DEVICE = ChannelKind(
    'device',
    'areal_jax.app.parts.channels:build_device',
    reaches_processes=False,
    note='in this process',
    shares_copy=True,
)
FILES = ChannelKind(
    'files',
    'areal_jax.app.parts.channels:build_files',
    reaches_processes=True,
    note='safetensors directories',
    has_deltas=True,
)
SHM = ChannelKind(
    'shm',
    'areal_jax.app.parts.channels:build_carried',
    reaches_processes=True,
    note='shared memory of a host',
    has_deltas=True,
    sends_records=True,
)
STREAM = ChannelKind(
    'stream',
    'areal_jax.app.parts.channels:build_carried',
    reaches_processes=True,
    note='sockets',
    has_deltas=True,
    sends_records=True,
    uses_network=True,
)

SERVERS: Mapping[str, ServerKind] = {kind.name: kind for kind in (IN_PROCESS, OWN, VLLM, SGLANG, JETSTREAM, EXTERNAL)}
CHANNELS: Mapping[str, ChannelKind] = {kind.name: kind for kind in (DEVICE, FILES, SHM, STREAM)}


def find_server(name: str) -> ServerKind:
    """Returns the kind that rollout.server names.

    Raises UserError for a name that is neither in the table nor the user's own function that returns a kind.
    """
    return _find(SERVER, name, SERVERS, ServerKind)


def find_channel(name: str) -> ChannelKind:
    """Returns the kind that publication.channel names; raises UserError as `find_server` does."""
    return _find(CHANNEL, name, CHANNELS, ChannelKind)


def resolve(reference: Reference, field: str) -> Callable[..., Any]:
    """Returns the function that `reference` names; `field` is the config field that names the kind, for errors."""
    return load_function(reference, field) if isinstance(reference, str) else reference


def name_launched() -> str:
    """ "'own', 'vllm', 'sglang' or 'jetstream'": the kinds that launchers start, for errors."""
    *names, last = [repr(kind.name) for kind in SERVERS.values() if kind.launch]
    return f'{", ".join(names)} or {last}'


def describe_channels() -> str:
    """ "'device': in this process, ...": for the list of fields."""
    return ', '.join(f'{kind.name!r}: {kind.note}' for kind in CHANNELS.values())


def describe_addresses() -> str:
    """ "'sglang+http://host:port' or ...": what may stand in rollout.urls."""
    return ' or '.join(f"'{client.name}+http://host:port'" for client in EXTERNAL.clients)


def _find(field: str, name: str, table: Mapping[str, Kind], expected: type[Kind]) -> Kind:
    if name in table:
        return table[name]
    if not is_own(name):
        raise ConfigError(f'{field}={name!r} is not known; use one of {", ".join(table)}')
    make = load_function(name, field)
    with raising_user_error(name, field):
        kind = make()
    if not isinstance(kind, expected):
        raise ConfigError(
            f'{field}={name} returns a {type(kind).__name__}; return a {expected.__name__} of areal_jax.config.kinds'
        )
    return kind
