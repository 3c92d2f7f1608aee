"""Reads a compiled program from its text: buffers, collectives, kernels, copies and products, each with its repeats.

XLA prints a program as computations of one instruction a line. A `while` says how often it runs its body where that is
known, so a layer inside a scan counts once for each layer.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from jax.sharding import Mesh

_BYTES = {
    'pred': 1, 's4': 0.5, 'u4': 0.5, 's8': 1, 'u8': 1, 's16': 2, 'u16': 2, 's32': 4, 'u32': 4, 's64': 8, 'u64': 8,
    'f16': 2, 'bf16': 2, 'f32': 4, 'f64': 8, 'c64': 8, 'c128': 16, 'f8e4m3fn': 1, 'f8e5m2': 1, 'f8e8m0fnu': 1,
    'f4e2m1fn': 0.5, 'token': 0, 'opaque': 0,
}  # fmt: skip
RAGGED = 'ragged-all-to-all'
COLLECTIVES = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute', RAGGED)
_SCATTER = 'all-reduce-scatter'  # begins the name of a TPU's computation that is a reduce-scatter
# custom calls that launch nothing
_MARKERS = ('Sharding', 'AllocateBuffer', 'AssumeGatherIndicesInBound', 'ConcatBitcast')
_MOVES = {'copy', 'copy-start', 'transpose'}
_FREE = {'parameter', 'bitcast', 'constant', 'reshape', 'tuple', 'get-tuple-element'}  # no work, no memory of their own
# whose called computations are applied to elements, or run inside of one launch
_APPLIERS = ('fusion', *COLLECTIVES, 'reduce', 'reduce-window', 'sort', 'scatter', 'map', 'select-and-scatter')
_NO_BUFFER = _FREE | {'while', 'conditional', 'call', 'opt-barrier', 'after-all', 'copy-done'}
_HEADER = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\) -> .+ \{$')
_INSTRUCTION = re.compile(r'^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$')
_ARRAY = re.compile(r'\b([a-z]\w*)\[([\d,]*)\]')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(r'(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)')
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')
_INDEX = re.compile(r'index=(\d+)')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r'stack_frame_id=(\d+)')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_IOTA = re.compile(r'replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?')
_AXES = re.compile(r'replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}')
_AXIS = re.compile(r"'([^']*)'(?:=(\d+))?(?::\((\d+)\)(\d+))?")
_LISTS = re.compile(r'(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}')
_DIM_LABELS = re.compile(r'dim_labels=(\w+)_(\w+)->(\w+)')
_WINDOW = re.compile(r'window=\{([^}]*)\}')

Groups = frozenset[frozenset[int]]


@dataclasses.dataclass(frozen=True)
class Array:
    """Dtype and sizes of one array of a result or operand."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return int(math.prod(self.sizes) * _BYTES.get(self.dtype, 0))

    def __str__(self) -> str:
        return f'{self.dtype}[{",".join(map(str, self.sizes))}]'


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    arrays: tuple[Array, ...]  # of the result
    opcode: str
    operands: tuple[str, ...]
    rest: str  # attributes and metadata

    @property
    def op_name(self) -> str:
        found = _OP_NAME.search(self.rest)
        return found[1] if found else ''

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

    @property
    def largest(self) -> Array:
        return max(self.arrays, key=lambda array: array.bytes, default=Array('opaque', ()))


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program: instructions by computation, and how often a run executes each computation."""

    computations: Mapping[str, tuple[Instruction, ...]]
    times: Mapping[str, int]  # of a computation, and 0 for one that is only applied to elements
    inside: frozenset[str]  # computations of fusions: their results have no buffers
    sources: Mapping[int, str]  # 'learning/forward.py:120 (attend)' by stack frame, where it is code of this package

    def executed(self) -> Iterator[tuple[Instruction, int]]:
        """Yields every instruction that is launched, with its number of executions."""
        for name, instructions in self.computations.items():
            if name not in self.inside and (times := self.times.get(name, 0)):
                for instruction in instructions:
                    yield instruction, times

    def source_of(self, instruction: Instruction) -> str:
        """The innermost line of this package that made the instruction, else the name that jax gave it."""
        found = _FRAME.search(instruction.rest)
        return (self.sources.get(int(found[1]), '') if found else '') or instruction.op_name


def parse(text: str) -> Module:
    """Parses the text of a compiled program (jax.stages.Compiled.as_text)."""
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name, lines = '', '', list[Instruction]()
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name, lines = header[2], []
            entry = name if header[1] else entry
        elif line == '}' and name:
            computations[name], name = tuple(lines), ''
        elif name and (found := _INSTRUCTION.match(line)):
            lines.append(_parse_instruction(found[1], found[2]))
        elif name and lines:  # a kernel's own metadata has several lines, and the instruction's follows them
            lines[-1] = dataclasses.replace(lines[-1], rest=lines[-1].rest + line)
    inside = frozenset(
        called
        for instructions in computations.values()
        for one in instructions
        if one.opcode.removesuffix('-start') in _APPLIERS
        for called in _CALLED.findall(one.rest)
    )
    return Module(computations, _count_times(computations, entry), inside, _read_sources(text))


def _parse_instruction(name: str, text: str) -> Instruction:
    shape, text = _split_at_space(text)
    opcode, _, text = text.partition('(')
    operands, rest = _split_at_close(text)
    operands = re.sub(r'/\*.*?\*/', '', operands)  # /*index=5*/
    names = tuple(part.split()[-1].lstrip('%') for part in _split_list(operands) if part.strip())
    arrays = tuple(Array(d, tuple(map(int, filter(None, sizes.split(','))))) for d, sizes in _ARRAY.findall(shape))
    return Instruction(name, tuple(one for one in arrays if one.dtype in _BYTES), opcode.strip(), names, rest)


def _split_at_space(text: str) -> tuple[str, str]:
    """Splits at the first space outside of brackets."""
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter in '([{') - (letter in ')]}')
        if letter == ' ' and depth == 0:
            return text[:index], text[index + 1 :]
    return text, ''


def _split_at_close(text: str) -> tuple[str, str]:
    """Splits at the bracket that closes the one before `text`."""
    depth = 1
    for index, letter in enumerate(text):
        depth += (letter in '([{') - (letter in ')]}')
        if depth == 0:
            return text[:index], text[index + 1 :]
    return text, ''


def _split_list(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter in '([{') - (letter in ')]}')
        if letter == ',' and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


def _count_times(computations: Mapping[str, Sequence[Instruction]], entry: str) -> dict[str, int]:
    """Counts the executions of each computation from `entry`; a loop of unknown length counts once."""
    times: collections.Counter[str] = collections.Counter()

    def visit(name: str, count: int) -> None:
        times[name] += count
        for one in computations.get(name, ()):
            applies = one.opcode != 'fusion' and one.opcode.removesuffix('-start') in _APPLIERS
            called = [] if applies else _CALLED.findall(one.rest)
            called += [part.strip().lstrip('%') for found in _BRANCHES.findall(one.rest) for part in found.split(',')]
            repeats = _find_trips(one, computations) if one.opcode == 'while' else 1
            for other in called:
                visit(other, count * repeats)

    visit(entry, 1)
    return dict(times)


def _find_trips(loop: Instruction, computations: Mapping[str, Sequence[Instruction]]) -> int:
    """The iterations of a `while`: told by XLA, or those of a counter from 0 up to a constant; 1 if unknown."""
    if told := _TRIPS.search(loop.rest):
        return int(told[1])
    condition, body = (_find_lines(loop, key, computations) for key in ('condition', 'body'))
    constants = [
        int(n) for one in condition.values() if one.opcode == 'constant' for n in one.operands if n.isdecimal()
    ]
    if len(constants) != 1 or not body:
        return 1
    places = [_INDEX.search(one.rest) for one in condition.values() if one.opcode == 'get-tuple-element']
    results = list(body.values())[-1].operands
    steps = {_find_step(results[int(place[1])], body) for place in places if place and int(place[1]) < len(results)}
    step = max(steps, default=1)
    return max(-(-constants[0] // max(step, 1)), 1)


def _find_lines(
    loop: Instruction, key: str, computations: Mapping[str, Sequence[Instruction]]
) -> dict[str, Instruction]:
    found = re.search(rf'{key}=%?([\w.\-]+)', loop.rest)
    return {one.name: one for one in computations.get(found[1], ())} if found else {}


def _find_step(name: str, body: Mapping[str, Instruction]) -> int:
    """What an iteration adds to a counter: an unrolled loop adds more than 1. 0 if it is not a sum of constants."""
    one = body.get(name)
    if one is None:
        return 0
    if one.opcode == 'constant':
        return int(one.operands[0]) if one.operands and one.operands[0].isdecimal() else 0
    return sum(_find_step(operand, body) for operand in one.operands) if one.opcode in ('add', 'copy') else 0


def _read_sources(text: str) -> dict[int, str]:
    """The tables of files, functions and frames at the head of a program, joined by frame."""
    tables: dict[str, dict[int, str]] = {}
    table: dict[int, str] | None = None
    for line in text.splitlines():
        if line in ('FileNames', 'FunctionNames', 'FileLocations', 'StackFrames'):
            table = tables.setdefault(line, {})
        elif table is not None and (found := re.match(r'(\d+) (.*)', line)):
            table[int(found[1])] = found[2]
        elif line.startswith(('%', 'ENTRY')):
            break

    def number(told: str, key: str) -> int:
        value = re.search(rf'{key}=(\d+)', told)
        return int(value[1]) if value else 0

    def name(frame: int) -> str:
        while (told := tables.get('StackFrames', {}).get(frame)) is not None:
            location = tables.get('FileLocations', {}).get(number(told, 'file_location_id'), '')
            file = tables.get('FileNames', {}).get(number(location, 'file_name_id'), '').strip('"')
            if '/areal_jax/' in file:
                function = tables.get('FunctionNames', {}).get(number(location, 'function_name_id'), '').strip('"')
                return f'{file.rpartition("/areal_jax/")[2]}:{number(location, "line")} ({function.rpartition(".")[2]})'
            parent = number(told, 'parent_frame_id')
            if parent == frame:
                break
            frame = parent
        return ''

    named = {frame: name(frame) for frame in tables.get('StackFrames', {})}
    return {frame: line for frame, line in named.items() if line}


# What a program has.


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of exchange between devices."""

    kind: str
    axes: str  # of the mesh, 'fsdp' or 'fsdp x tensor'; '?' if the groups are those of no axes
    array: str
    bytes: int  # of the larger side on a device, once
    times: int
    source: str


@dataclasses.dataclass(frozen=True)
class Cover:
    """The exchanges of one kind in one computation, and what a device runs while they are under way."""

    kind: str
    exchanges: int
    bytes: int  # of all of them, as in Collective, once
    kernels: int  # products and kernels between their starts and ends, each counted once
    times: int  # executions of the computation: of the body of a loop, its iterations


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A result of at least some size, or a copy of one."""

    array: str
    bytes: int
    times: int
    source: str


def find_collectives(module: Module, mesh: Mesh | None) -> list[Collective]:
    """Lists the collectives, the most bytes in all first; equal ones are one entry."""
    found: collections.Counter[tuple[str, str, str, int, str]] = collections.Counter()
    axes = {} if mesh is None else _groups_by_axes(mesh)
    for computation, instructions in module.computations.items():  # fusions too: a TPU's reduce-scatter is one
        scatters = computation.startswith(_SCATTER)
        by_name = {one.name: one for one in instructions}
        for one in instructions:
            kind = 'reduce-scatter' if scatters else one.opcode.removesuffix('-start')
            if one.opcode.removesuffix('-start') in COLLECTIVES and (times := module.times.get(computation, 0)):
                size = _count_moved(one, by_name)
                found[kind, _name_axes(one.rest, axes), str(one.largest), size, module.source_of(one)] += times
    listed = [Collective(kind, on, array, size, times, at) for (kind, on, array, size, at), times in found.items()]
    return sorted(listed, key=lambda one: -one.bytes * one.times)


def _count_moved(one: Instruction, by_name: Mapping[str, Instruction]) -> int:
    """Bytes of the larger side of an exchange; several arrays that were combined into one count together.

    Of a ragged one all the room counts, since the program does not say how much of it is in use.
    """
    operands = [by_name[name].bytes for name in one.operands if name in by_name]
    given, result = sum(operands), one.bytes
    if one.opcode.endswith('-start') and result > given:  # its result has the operands too
        result -= given
    if one.opcode.startswith(RAGGED):  # the second operand is the array that is written to
        given = max(operands, default=0)
    return max(given, result)


def find_covers(module: Module) -> list[Cover]:
    """Lists by kind what the exchanges of each computation cover, the largest bytes of a run first.

    A program's text is in the order in which a device launches, so a kernel between start and end of an exchange can
    run beside it. An exchange without a start covers nothing.
    """
    found = []
    wrapped = {
        name for one, _ in module.executed() if one.opcode == 'async-start' for name in _CALLED.findall(one.rest)
    }
    for name, instructions in module.computations.items():
        if name in module.inside | wrapped or not (times := module.times.get(name, 0)):
            continue
        by_kind: dict[str, list[tuple[int, set[str]]]] = {}
        for kind, size, covered in _list_exchanges(module, instructions):
            by_kind.setdefault(kind, []).append((size, covered))
        for kind, exchanges in by_kind.items():
            kernels = set[str]().union(*(covered for _, covered in exchanges))
            found.append(Cover(kind, len(exchanges), sum(size for size, _ in exchanges), len(kernels), times))
    return sorted(found, key=lambda one: -one.bytes * one.times)


def _list_exchanges(module: Module, instructions: Sequence[Instruction]) -> Iterator[tuple[str, int, set[str]]]:
    """Yields kind, bytes and the names of the covered kernels of each exchange of a computation."""
    by_name = {one.name: one for one in instructions}
    under_way: dict[str, set[str]] = {}
    for one in instructions:
        if one.opcode.endswith('-update') and one.operands and one.operands[0] in under_way:
            under_way[one.name] = under_way.pop(one.operands[0])
        elif one.opcode.endswith('-done'):
            under_way.pop(one.operands[0] if one.operands else '', None)
        elif _is_kernel(module, one):
            for covered in under_way.values():
                covered.add(one.name)
        if kind := _find_kind(module, one):
            covered = set[str]()
            if one.opcode.endswith('-start'):
                under_way[one.name] = covered
            yield kind, _count_moved(one, by_name), covered


def _find_kind(module: Module, one: Instruction) -> str:
    """The kind of the exchange that an instruction makes or starts; '' if it makes none."""
    if (kind := one.opcode.removesuffix('-start')) in COLLECTIVES:
        return kind
    if one.opcode not in ('fusion', 'async-start'):
        return ''
    called = _CALLED.findall(one.rest)
    if any(name.startswith(_SCATTER) for name in called):
        return 'reduce-scatter'
    kinds = {inner.opcode for name in called for inner in module.computations.get(name, ())}
    return next((kind for kind in COLLECTIVES if kind in kinds), '')


def _is_kernel(module: Module, one: Instruction) -> bool:
    """Whether an instruction launches a product of matrices, or a kernel that XLA did not write."""
    if one.opcode == 'custom-call':
        return _is_own_kernel(one)
    if one.opcode == 'fusion':
        called = _CALLED.findall(one.rest)
        return any(_is_kernel(module, inner) for name in called for inner in module.computations.get(name, ()))
    return one.opcode in ('dot', 'convolution')


def find_kernels(module: Module) -> dict[str, int]:
    """Counts the launches of kernels that XLA did not write itself, by target and name."""
    found: collections.Counter[str] = collections.Counter()
    for one, times in module.executed():
        if _is_own_kernel(one) and (target := _TARGET.search(one.rest)):
            name = one.op_name.removesuffix('/pallas_call').rpartition('/')[2]
            found[f'{target[1]} {name}'.strip()] += times
    return dict(found.most_common())


def _is_own_kernel(one: Instruction) -> bool:
    if one.opcode != 'custom-call' or not (target := _TARGET.search(one.rest)):
        return False
    return target[1] not in _MARKERS and not target[1].startswith(('SPMD', 'PrepareAsyncCall'))


def find_copies(module: Module, at_least: int) -> list[Buffer]:
    """Lists copies and transposes of at least so many bytes, the largest first; equal ones are one entry."""

    def moves(one: Instruction) -> bool:
        if one.opcode != 'fusion':
            return one.opcode in _MOVES
        called = _CALLED.findall(one.rest)
        body = {inner.opcode for name in called for inner in module.computations.get(name, ())} - _FREE
        return bool(body) and body <= _MOVES

    return _list_buffers(module, at_least, moves)


def find_buffers(module: Module, most: int) -> list[Buffer]:
    """Lists the largest results, equal ones as one entry; they need not exist at the same time."""
    return _list_buffers(module, 1 << 20, lambda one: one.opcode not in _NO_BUFFER)[:most]


def _list_buffers(module: Module, at_least: int, wanted: Callable[[Instruction], bool]) -> list[Buffer]:
    found: collections.Counter[tuple[Array, str]] = collections.Counter()
    for one, times in module.executed():
        if one.largest.bytes >= at_least and wanted(one):
            found[one.largest, module.source_of(one)] += times
    listed = [Buffer(str(array), array.bytes, times, at) for (array, at), times in found.items()]
    return sorted(listed, key=lambda one: (-one.bytes, one.source))


def count_flops(module: Module) -> float:
    """The arithmetic of all matrix products of one run on a device, in flops; kernels are not among them."""
    return sum(
        module.times.get(name, 0) * _flops(one, by_name)
        for name, instructions in module.computations.items()
        for by_name in [{one.name: one for one in instructions}]
        for one in instructions
        if one.opcode in ('dot', 'convolution')
    )


def _flops(one: Instruction, by_name: Mapping[str, Instruction]) -> float:
    sides = [by_name[name].largest.sizes if name in by_name else () for name in one.operands[:2]]
    if one.opcode == 'dot':
        axes = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', one.rest)
        inner = math.prod(sides[0][int(axis)] for axis in axes[1].split(',') if axis) if axes and sides[0] else 1
        return 2.0 * math.prod(one.largest.sizes) * inner
    labels = _DIM_LABELS.search(one.rest)
    if labels is None or not all(sides):
        return 0.0
    left, right, out = labels.groups()
    spatial = [label for label in right if label.isdecimal()]
    window = dict(part.split('=') for part in (_WINDOW.search(one.rest) or ['', ''])[1].split())
    used = math.prod(
        _used_places(sides[0][left.index(axis)], sides[1][right.index(axis)], one.largest.sizes[out.index(axis)],
                     {name: text.split('x')[int(axis)] for name, text in window.items()})
        for axis in spatial
    )  # fmt: skip
    outer = math.prod(one.largest.sizes[out.index(label)] for label in 'bf')
    return 2.0 * used * outer * sides[1][right.index('i')]


def _used_places(size: int, kernel: int, out: int, window: Mapping[str, str]) -> int:
    """Pairs of output and kernel places of a spatial axis that meet an input, as XLA counts them."""
    stride, low = int(window.get('stride', 1)), int(window.get('pad', '0_0').split('_')[0])
    into, apart = int(window.get('lhs_dilate', 1)), int(window.get('rhs_dilate', 1))
    place = np.arange(out)[:, None] * stride + np.arange(kernel)[None] * apart - low
    return int(((place >= 0) & (place % into == 0) & (place // into < size)).sum())


# The axes of a mesh over which a collective runs.


def _groups_by_axes(mesh: Mesh) -> dict[Groups, str]:
    """The groups of devices, by their places in the mesh, that an exchange over each set of axes has."""
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    places = np.arange(mesh.size).reshape(tuple(sizes.values()) or (1,))
    found: dict[Groups, str] = {}
    for count in range(1, len(sizes) + 1):
        for names in itertools.combinations(sizes, count):
            own = [list(sizes).index(name) for name in names]
            last = np.moveaxis(places, own, range(-len(own), 0))
            groups = last.reshape(-1, math.prod(sizes[name] for name in names))
            found.setdefault(frozenset(frozenset(map(int, group)) for group in groups), ' x '.join(names))
    return found


def _name_axes(rest: str, axes: Mapping[Groups, str]) -> str:
    groups = _read_groups(rest)
    if groups in axes:
        return axes[groups]
    if 'source_target_pairs' in rest:  # pairs of a permutation lie inside of the groups of its axis
        inside = lambda known: all(any(pair <= whole for whole in known) for pair in groups)
        return next((name for known, name in axes.items() if inside(known)), '?')
    return '?'


@functools.lru_cache(maxsize=4096)
def _read_groups(rest: str) -> Groups:
    if found := _IOTA.search(rest):
        groups, size = int(found[1]), int(found[2])
        dims = [int(n) for n in found[3].split(',')]
        order = [int(n) for n in found[4].split(',')] if found[4] else range(len(dims))
        places = np.arange(math.prod(dims)).reshape(dims).transpose(*order).reshape(groups, size)
        return frozenset(frozenset(map(int, group)) for group in places)
    if found := _AXES.search(rest):
        return _groups_of_axes(_AXIS.findall(found[1]), _AXIS.findall(found[2]))
    if listed := _LISTS.search(rest):
        return frozenset(
            frozenset(int(n) for n in group.split(',') if n) for group in re.findall(r'\{([\d,]*)\}', listed[1])
        )
    return frozenset()


def _groups_of_axes(sizes: Sequence[Sequence[str]], over: Sequence[Sequence[str]]) -> Groups:
    """The groups of mesh['a'=2,'b'=4] {'b':(2)2}: over the part of size 2 of axis b that has 2 before it."""
    names, dims = [], list[int]()
    parts = {name: (int(before or 1), int(size or 0)) for name, _, before, size in over}
    for name, size, *_ in sizes:
        before, own = parts.get(name, (1, 0))
        cut = (before, own or int(size), int(size) // (before * (own or int(size))))
        names += [f'{name} before', name, f'{name} after']
        dims += cut
    places, axes = np.arange(math.prod(dims)).reshape(dims), [names.index(name) for name in parts]
    last = np.moveaxis(places, axes, range(-len(axes), 0))
    groups = last.reshape(-1, math.prod(dims[axis] for axis in axes))
    return frozenset(frozenset(map(int, group)) for group in groups)
