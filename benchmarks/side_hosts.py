"""Versions of random weights from a learner of four processes to two engines: as shards over sockets, or as files.

    python -m benchmarks.side_hosts '{"way": "shards", "model": "135M", "delta": false}'

This process is process 0 of the learner; it starts the other three and the engines, so that its CPU seconds are of all.
Way 'files' is what a learner of several processes did before it sent shards: each process writes whole leaves, and an
engine reads them all and computes every digest. Way 'sockets' copies the same bytes between as many pairs of processes,
with buffers that are reused on both sides, and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

PROCESSES, DEVICES, ENGINES = 4, 2, 2
os.environ['XLA_FLAGS'] = f'--xla_force_host_platform_device_count={DEVICES}'
DEADLINE_S = 600.0
_PIECE = 4 << 20  # bytes of a call of send
KEY = bytes(range(32))
MODELS = {  # Qwen3's shape: vocabulary, width, layers, heads, key and value heads, head, MLP
    'tiny': (512, 64, 2, 8, 4, 16, 128),
    '135M': (151_936, 512, 18, 8, 4, 64, 1536),
    '2GB': (151_936, 1536, 23, 8, 4, 128, 6144),
}


class Weights:
    """A learner that only changes weights: `restore` moves about 2 % of the elements by one step of their format."""

    def __init__(self, model: str, seed: int, *, leaves: bool):
        import jax
        import jax.numpy as jnp
        from jax import lax

        from areal_jax.config.cluster import parse_learner
        from areal_jax.models.decoder import Decoder
        from areal_jax.models.families import ModelConfig
        from areal_jax.models.weights import logical_axes
        from areal_jax.sharding.rules import Shares, mesh_of, param_shardings

        vocabulary, width, layers, heads, kv_heads, head, mlp = MODELS[model]
        self.config = ModelConfig(
            vocab_size=vocabulary, d_model=width, n_layers=layers, n_heads=heads, n_kv_heads=kv_heads, head_dim=head,
            d_ff=mlp, rope_theta=1e6, family='qwen3', qk_norm=True, tie_embeddings=True,
        )  # fmt: skip
        described = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), Decoder(self.config).abstract()
        )
        mesh = mesh_of(parse_learner(f'hosts={PROCESSES} x fsdp={PROCESSES},tensor={DEVICES}'))
        shardings = param_shardings(described, logical_axes(self.config), mesh, 'fsdp_tensor')

        def draw(seed: jax.Array) -> Any:
            found, structure = jax.tree.flatten(described)
            return jax.tree.unflatten(structure, [_draw_leaf(seed + n, leaf.shape) for n, leaf in enumerate(found)])

        def move(weights: Any, version: jax.Array) -> Any:
            def one(leaf: jax.Array) -> jax.Array:
                bits = lax.bitcast_convert_type(leaf, jnp.uint16)
                mixed = (bits * jnp.uint16(40503) + version.astype(jnp.uint16) * jnp.uint16(977)) & 0xFF
                return lax.bitcast_convert_type(bits ^ (mixed < 5).astype(jnp.uint16), jnp.bfloat16)

            return jax.tree.map(one, weights)

        self._weights = jax.jit(draw, out_shardings=shardings)(np.uint32(seed))
        self._move = jax.jit(move, out_shardings=shardings, donate_argnums=0)
        describe = lambda leaf, on: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on)
        outer, layers = _cut(jax.tree.map(describe, described, shardings))
        # layer by layer: one program for all leaves needs more memory than the machine of this benchmark has
        self._shares = [Shares(part, mesh) for part in (outer, layers['0']) if leaves]
        self._spread = [jax.jit(each.spread, out_shardings=each.shardings) for each in self._shares]
        self.nbytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(described))

    def restore(self, saved: dict[str, int]) -> None:
        """Moves the weights to a version; named as a command of learners."""
        import jax

        if saved['version']:
            self._weights = self._move(self._weights, np.int32(saved['version']))
        jax.block_until_ready(self._weights)

    def publish(self, version: int) -> Any:
        """Returns the weights: sharded, or whole leaves by process."""
        import jax

        if not self._shares:
            return self._weights
        outer, layers = _cut(self._weights)
        exchange = lambda index, part: self._shares[index].collect(jax.block_until_ready(self._spread[index](part)))
        return exchange(0, outer) | {'layers': {name: exchange(1, layer) for name, layer in layers.items()}}

    def lead(self, send: Any) -> None:
        """Sends no rows: there are no updates."""

    def follow(self, take: Any) -> None:
        """Takes no rows."""

    def require_finite(self, what: str, fix: str) -> None:
        """Gathers the leaves on every process and notes their digest on process 0; named as a command of learners."""
        import jax

        from areal_jax.sharding.placement import gather

        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(self._weights):
            whole = gather(leaf)
            if jax.process_index() == 0:
                digest.update(whole.tobytes())
        self.digest = digest.hexdigest()


def _cut(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The leaves outside of the layers, and the layers."""
    return {name: leaf for name, leaf in tree.items() if name != 'layers'}, tree['layers']


def _draw_leaf(seed: Any, shape: tuple[int, ...]) -> Any:
    """Finite bfloat16 values from the positions of a leaf, so that each device makes its own."""
    import jax.numpy as jnp
    from jax import lax

    word = jnp.full(shape, seed, jnp.uint32)
    for axis in range(len(shape)):
        word = (word ^ lax.broadcasted_iota(jnp.uint32, shape, axis)) * np.uint32(2654435769)
        word ^= word >> 15
    return lax.bitcast_convert_type(word.astype(jnp.uint16) & 0xBFFF, jnp.bfloat16)


@contextlib.contextmanager
def open_versions(way: str, weights: Weights, *, delta: bool) -> Iterator[Any]:
    """What this process writes or sends its part of versions with."""
    from areal_jax.distributed.peers import prove_as_server
    from areal_jax.publication.carriers.stream_sender import StreamSender
    from areal_jax.publication.export import PartWriter
    from areal_jax.publication.shard_channel import ShardSender

    if way == 'files':
        yield PartWriter(weights.config)
        return
    carrier = StreamSender(
        functools.partial(prove_as_server, key=KEY), '127.0.0.1', delta_share=0.5 if delta else 0.0, most_places=2
    )
    with contextlib.closing(ShardSender(carrier, delta=delta)) as sender:
        yield sender


def join(arguments: dict[str, Any], index: int) -> Weights:
    """Makes this one of the processes of the learner."""
    import jax

    jax.distributed.initialize(arguments['coordinator'], num_processes=PROCESSES, process_id=index)
    return Weights(arguments['model'], arguments['seed'], leaves=arguments['way'] == 'files')


def follow_leader(arguments: dict[str, Any], index: int) -> None:
    """Runs a process of the learner but the first."""
    from areal_jax.distributed.remote_learner import follow
    from areal_jax.distributed.rendezvous import accept_invitation

    weights = join(arguments, index)
    with open_versions(arguments['way'], weights, delta=arguments['delta']) as versions:
        follow(weights, accept_invitation('', DEADLINE_S), versions=versions)


def run_engine(arguments: dict[str, Any]) -> None:
    """Takes the version that each line names, and answers with its digest where it is asked to."""
    import jax

    from areal_jax.distributed.peers import prove_as_client
    from areal_jax.formats.hf_config import read_hf_config
    from areal_jax.publication.carriers.stream_receiver import Reader, open_receiver
    from areal_jax.publication.files_channel import find_version, load_version
    from areal_jax.publication.record_channel import WeightsReader

    reader, held = None, None
    answers = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked.get('digest'):
            digest = hashlib.sha256()
            for leaf in jax.tree.leaves(held):
                digest.update(np.asarray(leaf).tobytes())
            print(json.dumps(digest.hexdigest()), file=answers, flush=True)
            continue
        held = None  # as an engine that has swapped; its memory is used again
        import time

        T0 = time.process_time()
        version, handle = asked['version'], asked['handle']
        if arguments['way'] == 'files':
            config = read_hf_config(pathlib.Path(handle))
            held = load_version(find_version(handle, version), config, verify=True)
        else:
            if reader is None:
                prove = functools.partial(prove_as_client, key=KEY)
                reader = WeightsReader(open_receiver(handle, Reader(arguments['name'], prove)), jax.devices()[0])
            held, _ = reader.receive(version, asked['manifest_hash'])
        jax.block_until_ready(held)
        import time

        print('engine', round(time.process_time() - T0, 3), file=sys.stderr, flush=True)
        print('{}', file=answers, flush=True)


# Process 0.


@dataclasses.dataclass
class Program:
    """A process that was started here, which answers lines with lines."""

    process: subprocess.Popen[str]

    def ask(self, asked: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        print(json.dumps(asked), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f'a process ended with {self.process.wait()}')
        return json.loads(line)


def start_program(arguments: dict[str, Any], **role: Any) -> Program:
    command = [sys.executable, '-m', 'benchmarks.side_hosts', json.dumps(arguments | role)]
    return Program(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))


def prepare_versions(arguments: dict[str, Any]) -> Any:
    """Starts all processes; a call is a version from the learner's weights to the engines."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        arguments |= {'coordinator': f'127.0.0.1:{free.getsockname()[1]}'}
    folder = tempfile.mkdtemp(prefix='hosts-')
    opened = contextlib.ExitStack()  # as long as the calls
    followers = [start_program(arguments, index=index) for index in range(1, PROCESSES)]
    engines = [start_program(arguments, engine=True, name=f'engine {index}') for index in range(ENGINES)]

    def start() -> tuple[Callable[[], dict[str, Any]], Callable[[], dict[str, Any]]]:
        from areal_jax.distributed.peers import Peers
        from areal_jax.distributed.remote_learner import CommandLeader, publish_everywhere
        from areal_jax.distributed.rendezvous import invite
        from areal_jax.publication.files_channel import FilesChannel
        from areal_jax.publication.shard_versions import ShardVersions
        from benchmarks.sides import Stopwatch

        weights = join(arguments, 0)
        workdir = pathlib.Path(folder)
        peers = Peers(invite('127.0.0.1', workdir, '', DEADLINE_S), deadline_s=DEADLINE_S)
        leader: Any = CommandLeader(weights, peers)  # type: ignore[arg-type]
        own = opened.enter_context(open_versions(arguments['way'], weights, delta=arguments['delta']))
        channel: Any
        if arguments['way'] == 'files':
            channel = FilesChannel(workdir / 'versions', weights.config, verify=True, writers=leader.writers)
        else:
            sent: list[int] = []

            def everywhere(name: str, *args: Any, copy: Any = None) -> list[Any]:
                results = publish_everywhere(peers, own)(name, *args, copy=copy)
                sent[:] = [each['n_bytes'] for each in results]
                return results

            channel = ShardVersions(everywhere, name='stream', delta=arguments['delta'])
        facts: dict[str, Any] = {'bytes': weights.nbytes, 'processes': PROCESSES, 'engines': ENGINES, 'versions': []}
        version = -1

        def call() -> dict[str, Any]:
            nonlocal version
            version += 1
            leader.restore({'version': version})
            watch = Stopwatch()
            watch.start()
            published = channel.transfer(version, leader.publish(version))
            for engine in engines:
                engine.ask({
                    'version': version, 'handle': str(published.handle), 'manifest_hash': published.manifest_hash,
                })  # fmt: skip
            for engine in engines:
                engine.answer()
            watch.stop()
            channel.release(version)
            if arguments['way'] == 'shards':
                facts['versions'].append({
                    'record': published.size.record, 'bytes': sum(sent), 'most_share': max(sent) / max(1, sum(sent)),
                })  # fmt: skip
            return {'tokens': weights.nbytes} | watch.parts()

        def check() -> dict[str, Any]:
            if version >= 0:
                leader.require_finite('', '')
                for engine in engines:
                    engine.ask({'digest': True})
                facts['bit_equal'] = [engine.answer() == weights.digest for engine in engines]
            return facts

        return call, check

    return start, followers + engines


def prepare_sockets(arguments: dict[str, Any]) -> Any:
    """Starts the pairs; a call sends the bytes of a version from all processes of a learner to all engines."""
    vocabulary, width, layers, heads, kv_heads, head, mlp = MODELS[arguments['model']]
    layer = width * head * (2 * heads + 2 * kv_heads) + 3 * width * mlp
    nbytes = 2 * (vocabulary * width + layers * layer)
    pairs = [socket.socketpair() for _ in range(PROCESSES * ENGINES)]
    programs = []
    for number in range(PROCESSES):
        own = [pairs[number * ENGINES + engine][0] for engine in range(ENGINES)]
        programs.append(_start_copier(arguments, own, 'send', nbytes // PROCESSES))
    for engine in range(ENGINES):
        own = [pairs[number * ENGINES + engine][1] for number in range(PROCESSES)]
        programs.append(_start_copier(arguments, own, 'receive', nbytes // PROCESSES))
    for pair in pairs:
        for each in pair:
            each.close()

    def call() -> dict[str, Any]:
        for program in programs:
            program.ask({})
        for program in programs:
            program.answer()
        return {'tokens': nbytes}

    return lambda: (call, dict), programs


def _start_copier(arguments: dict[str, Any], own: list[socket.socket], what: str, nbytes: int) -> Program:
    descriptors = [each.fileno() for each in own]
    command = [
        sys.executable, '-m', 'benchmarks.side_hosts',
        json.dumps(arguments | {'copier': what, 'descriptors': descriptors, 'nbytes': nbytes}),
    ]  # fmt: skip
    return Program(
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=descriptors)
    )


def copy_bytes(arguments: dict[str, Any]) -> None:
    """Sends or receives so many bytes over each socket, a thread each, for every line."""
    sockets = [socket.socket(fileno=number) for number in arguments['descriptors']]
    sends = arguments['copier'] == 'send'
    buffers = [bytearray(b'\1') * arguments['nbytes'] for _ in ([0] if sends else sockets)]

    def run(own: socket.socket, buffer: bytearray) -> None:
        view = memoryview(buffer)
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            if sends:
                own.sendall(piece)
                continue
            while piece:
                piece = piece[own.recv_into(piece) :]

    for _ in sys.stdin:
        threads = [
            threading.Thread(target=run, args=(own, buffers[0 if sends else index]))
            for index, own in enumerate(sockets)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print('{}', flush=True)


def main() -> None:
    arguments = json.loads(sys.argv[1])
    if 'copier' in arguments:
        copy_bytes(arguments)
    elif 'engine' in arguments:
        run_engine(arguments)
    elif 'index' in arguments:
        follow_leader(arguments, arguments['index'])
    else:
        from benchmarks.sides import serve

        programs: list[Program] = []

        def prepare(given: dict[str, Any]) -> Any:
            start, started = (prepare_sockets if given['way'] == 'sockets' else prepare_versions)(given)
            programs.extend(started)
            return start

        try:
            serve(prepare)
        except Exception:
            traceback.print_exc()
        for program in programs:
            program.process.kill()
        sys.stderr.flush()
        os._exit(0)  # without jax's barrier: the others are gone


if __name__ == '__main__':
    main()
