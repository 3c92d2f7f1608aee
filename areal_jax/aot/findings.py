"""What a compiled program shows: memory against the chip, exchanges, kernels, copies and a least time."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence

import jax

from areal_jax.aot import hlo
from areal_jax.aot.expected import UNKNOWN, Expected
from areal_jax.aot.programs import PlannedProgram
from areal_jax.aot.topology import Topology
from areal_jax.app.parts.sizes import fits, usable_bytes
from areal_jax.config.xla_flags import Flags
from areal_jax.telemetry.progress import format_bytes

LARGE_COPY = 64 * 10**6  # bytes
CLOSE = 0.02  # of the dry run's bytes: padding of a device's layout, and small arrays that the dry run does not count
_LARGE_EXCHANGE = 10**6
_BUFFERS, _SHOWN = 8, 4
_WORDS = {'true': True, 'false': False}
_NO_ROOM = ('RESOURCE_EXHAUSTED', 'Ran out of memory', 'exceeds available', 'out of memory')


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on a device while a program runs, as the compiler plans them."""

    arguments: int
    outputs: int  # without the ones that take the place of arguments
    temporaries: int
    peak: int  # the compiler's own, where it tells one; else the sum
    beside: int  # kept on the device meanwhile, and no argument
    results: int = 0  # all outputs, those in the place of arguments too

    @property
    def together(self) -> int:
        return self.peak + self.beside


@dataclasses.dataclass(frozen=True)
class Finding:
    """A program after compilation, or the sentence with which it was refused."""

    part: str
    name: str
    seconds: float  # of tracing, lowering and compiling, on this machine
    refusal: str = ''  # 'does not compile: ...', or 'DOES NOT FIT: ...' where its arguments alone have no room
    memory: Memory | None = None
    device_bytes: float = 0  # the memory of a device
    buffers: Sequence[hlo.Buffer] = ()
    collectives: Sequence[hlo.Collective] = ()
    covers: Sequence[hlo.Cover] = ()
    kernels: dict[str, int] = dataclasses.field(default_factory=dict)
    copies: Sequence[hlo.Buffer] = ()
    flops: float = 0  # of products, on a device; kernels are not counted
    floor_s: float = 0
    cpu_seconds: float = 0  # of the same, which other programs of the machine do not lengthen much
    expected: Expected = UNKNOWN
    differs: Mapping[str, float] = dataclasses.field(default_factory=dict)  # {'arguments': 0.01}: 1 % over the dry run

    @property
    def fits(self) -> bool:
        """Whether it compiled and its peak, with what is kept beside it, fits a device."""
        return self.memory is not None and fits(self.memory.together, self.device_bytes)

    def as_json(self) -> dict[str, object]:
        return dataclasses.asdict(self) | {'fits': self.fits}


def compile_program(planned: PlannedProgram, topology: Topology, flags: Flags | None = None) -> Finding:
    """Compiles a program, with flags of XLA, and reads it; a program that the compiler refuses is a finding too."""
    began, worked = time.perf_counter(), _cpu_seconds()
    given = (planned.expected.arguments or 0) + planned.beside_bytes
    if topology.memory_bytes and not fits(given, topology.memory_bytes):
        return Finding(planned.part, planned.name, 0.0, refusal=_say_no_room(given, topology))
    try:
        compiled = planned.lower().compile(compiler_options=_as_options(flags or {}))
    except Exception as error:  # kernels and compilers fail in many ways, and the other programs are still of interest
        said = f'does not compile: {_sentence(error)}'
        return Finding(planned.part, planned.name, time.perf_counter() - began, refusal=said)
    seconds, cpu_seconds = time.perf_counter() - began, _cpu_seconds() - worked
    module, memory = hlo.parse(compiled.as_text() or ''), read_memory(compiled, planned.beside_bytes)
    collectives, flops = hlo.find_collectives(module, planned.mesh), hlo.count_flops(module)
    return Finding(
        planned.part,
        planned.name,
        seconds,
        memory=memory,
        device_bytes=topology.memory_bytes,
        buffers=hlo.find_buffers(module, _BUFFERS),
        collectives=collectives,
        covers=hlo.find_covers(module),
        kernels=hlo.find_kernels(module),
        copies=hlo.find_copies(module, LARGE_COPY),
        flops=flops,
        floor_s=least_seconds(topology, memory, collectives, flops),
        cpu_seconds=cpu_seconds,
        expected=planned.expected,
        differs=dict(_compare(memory, planned.expected)),
    )


def _say_no_room(given: int, topology: Topology) -> str:
    room = format_bytes(usable_bytes(topology.memory_bytes))
    return (
        f'DOES NOT FIT: its arguments and what stays beside them take {format_bytes(given)} of the {room} of a device; '
        'use more devices, or a smaller model or cache'
    )


def _as_options(flags: Flags) -> dict[str, str | bool] | None:
    """The flags as options of one compilation, which takes no 'true' for True."""
    return {name: _WORDS.get(value.lower(), value) for name, value in flags.items()} or None


def _cpu_seconds() -> float:
    """Seconds of the CPU that this process and its ended children have taken."""
    return sum(os.times()[:4])


def _compare(memory: Memory, expected: Expected) -> Iterator[tuple[str, float]]:
    """Yields by how much of the dry run's bytes the compiled arguments and results differ from it."""
    for name, found, said in (
        ('arguments', memory.arguments, expected.arguments), ('outputs', memory.results, expected.outputs),
    ):  # fmt: skip
        if said:
            yield name, found / said - 1


def _sentence(error: Exception) -> str:
    """The compiler's own sentence on a program that has no room, else the first line of the error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if any(text in line for text in _NO_ROOM)), lines[0] if lines else '')
    return told or type(error).__name__


def read_memory(compiled: jax.stages.Compiled, beside: int) -> Memory:
    analysis = compiled.memory_analysis()
    assert analysis is not None, 'compilers for accelerators tell the memory'
    arguments, temporaries = int(analysis.argument_size_in_bytes), int(analysis.temp_size_in_bytes)
    outputs = int(analysis.output_size_in_bytes) - int(analysis.alias_size_in_bytes)
    code = int(analysis.generated_code_size_in_bytes)
    peak = int(getattr(analysis, 'peak_memory_in_bytes', 0)) or arguments + outputs + temporaries + code
    return Memory(arguments, outputs, temporaries, peak, beside, int(analysis.output_size_in_bytes))


def least_seconds(topology: Topology, memory: Memory, collectives: Sequence[hlo.Collective], flops: float) -> float:
    """Seconds below which the program cannot be: products at the chip's peak, every argument read once, or exchanges.

    With the chip's peaks of simulation/prices.py; kernels and second readings of memory are not counted, nor exchanges
    of which only the room is known.
    """
    chip, share = topology.chip, topology.share
    moved = sum(one.bytes * one.times for one in collectives if one.kind != hlo.RAGGED)
    return max(
        flops / topology.flops, memory.arguments / (chip.bytes_s / share), moved / (chip.interconnect_bytes_s / share)
    )


def render(finding: Finding) -> str:
    """Renders a program as a line of its memory and verdict, and indented lines of what was found."""
    head = f'{finding.part}: {finding.name}'
    if finding.memory is None:
        return f'{head}  {finding.refusal}'
    memory = finding.memory
    verdict = 'fits' if finding.fits else 'DOES NOT FIT'
    parts = [('arguments', memory.arguments), ('outputs', memory.outputs), ('temporaries', memory.temporaries),
             ('beside it', memory.beside)]  # fmt: skip
    listed = ', '.join(f'{name} {format_bytes(size)}' for name, size in parts if size)
    top = f'{format_bytes(memory.together)} of {format_bytes(usable_bytes(finding.device_bytes))}'
    lines = [f'{head}  {verdict}: {top} ({listed}), compiled in {finding.seconds:.0f} s']
    lines += [f'    {line}' for line in _describe_contents(finding)]
    return '\n'.join(lines)


def _describe_contents(finding: Finding) -> Iterator[str]:
    if finding.differs:
        close = all(abs(share) <= CLOSE for share in finding.differs.values())
        listed = ', '.join(f'{name} {share:+.1%}' for name, share in finding.differs.items())
        yield f'{"as" if close else "NOT AS"} the dry run says: {listed}'
    if finding.flops:
        needed = f', {finding.flops / needed:.2f} x what the model needs' if (needed := finding.expected.flops) else ''
        yield f'products {finding.flops / 1e12:.3g} TFLOP{needed}, at least {finding.floor_s * 1e3:.3g} ms'
    if finding.kernels:
        yield 'kernels ' + ', '.join(f'{count} x {name}' for name, count in finding.kernels.items())
    for one in finding.collectives[:_SHOWN]:
        yield f'{one.times} x {one.kind} over {one.axes}: {one.array}, {format_bytes(one.bytes)}, {one.source}'
    if (rest := len(finding.collectives) - _SHOWN) > 0:
        yield f'and {rest} smaller kinds of exchange'
    for cover in finding.covers:
        if cover.times > 1 and cover.bytes >= _LARGE_EXCHANGE:
            yield (
                f'{cover.exchanges} x {cover.kind} of a pass, {format_bytes(cover.bytes)}, covers {cover.kernels} '
                f'products or kernels, {cover.times} passes'
            )
    for title, buffers in (('copy', finding.copies), ('buffer', finding.buffers[:_SHOWN])):
        for buffer in buffers[:_SHOWN]:
            yield f'{title} {buffer.array}, {format_bytes(buffer.bytes)}, {buffer.times} x, {buffer.source}'
