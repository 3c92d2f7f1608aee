"""Two sides of `areal-aot --compare`: the programs of two configs for the same devices, measured side by side."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from areal_jax.aot import hlo
from areal_jax.aot.findings import Finding
from areal_jax.aot.programs import PlannedProgram
from areal_jax.config.xla_flags import Flags
from areal_jax.errors import UserError
from areal_jax.telemetry.progress import format_bytes

GIVEN = 'as given'  # the side of the command line without --compare
_CHANGE = re.compile(r'(?:--)?(?:config\.)?(\w+(?:\.\w+)+=.*)', re.DOTALL)
_SCATTERED = 'reduce-scatter'
_WIDTH = 40


@dataclasses.dataclass(frozen=True)
class Side:
    """The programs of one config, and what was found of those that are compiled already."""

    name: str
    layers: int
    vocabulary: int
    choices: Mapping[str, str]
    flags: Flags  # of XLA, for each compilation
    programs: Sequence[PlannedProgram]
    found: list[Finding] = dataclasses.field(default_factory=list)

    @property
    def fitting(self) -> int:
        return sum(one.fits for one in self.found)


def change_words(words: Sequence[str], changes: Sequence[str]) -> list[str]:
    """The command line of the other side: other fields, 'cluster.xla_flags=off', or another config file.

    Raises UserError for two files.
    """
    fields = [match[1] for change in changes if (match := _CHANGE.fullmatch(change))]
    files = [change for change in changes if not _CHANGE.fullmatch(change)]
    if len(files) > 1:
        raise UserError(
            f'--compare={files[0]} --compare={files[1]}: name one config file, or fields as SECTION.FIELD=VALUE'
        )
    left = _without(words, {'compare', *(['config'] if files else [])})
    return [*left, *(f'--config={file}' for file in files), *(f'--config.{field}' for field in fields)]


def _without(words: Sequence[str], flags: set[str]) -> Iterator[str]:
    """The words without these flags and their values."""
    remaining = iter(words)
    for word in remaining:
        name, equals, _ = word.lstrip('-').partition('=')
        if not word.startswith('-') or name not in flags:
            yield word
        elif not equals:
            next(remaining, None)


def covered_a_layer(finding: Finding, kind: str, layers: int) -> float:
    """Products and kernels of a layer beside its exchanges of a kind; passes outside of loops are not counted."""
    return sum(one.kernels * one.times for one in finding.covers if one.kind == kind and one.times > 1) / layers


def measure(finding: Finding, layers: int) -> dict[str, float | str]:
    """What is compared of a program, by name; bytes and counts are those of a device in one run."""
    if finding.memory is None:
        return {'refused': finding.refusal}
    moved: collections.Counter[str] = collections.Counter()
    for one in finding.collectives:
        moved[one.kind] += one.bytes * one.times
    return {
        'temporaries': finding.memory.temporaries,
        'peak': finding.memory.peak,
        **{kind: moved[kind] for kind in hlo.COLLECTIVES if kind in moved},
        **{
            f'kernels during {kind}s, a layer': round(covered_a_layer(finding, kind, layers), 2)
            for kind in ('all-gather', _SCATTERED)
            if kind in moved
        },
        'copies': sum(one.bytes * one.times for one in finding.copies),
        'least seconds': finding.floor_s,
    }


def compare(sides: Sequence[Side]) -> dict[str, dict[str, dict[str, float | str]]]:
    """{program: {side: {'temporaries': bytes, ...}}}, of the programs that are compiled."""
    found: dict[str, dict[str, dict[str, float | str]]] = {}
    for side in sides:
        for one in side.found:
            found.setdefault(f'{one.part}: {one.name}', {})[side.name] = measure(one, side.layers)
    return found


def render_comparison(sides: Sequence[Side]) -> str:
    """Renders a table for each program, a column for each side; '-' is what a side does not have."""
    names = [side.name for side in sides]
    widths = [max(len(name), 12) for name in names]
    lines = [_line('', names, widths)]
    for program, by_side in compare(sides).items():
        lines.append(program)
        rows = dict.fromkeys(row for measured in by_side.values() for row in measured)
        for row in rows:
            cells = [_format(row, by_side.get(name, {}).get(row)) for name in names]
            lines.append(_line(f'    {row}', cells, widths))
    return '\n'.join(lines)


def _line(head: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    joined = '  '.join(f'{cell:>{width}}' for cell, width in zip(cells, widths, strict=True))
    return f'{head:<{_WIDTH + 4}}  {joined}'.rstrip()


def _format(row: str, value: float | str | None) -> str:
    if value is None:
        return '-'
    if isinstance(value, str):
        return value
    if row == 'least seconds':
        return f'{value:.3g} s'
    return f'{value:g}' if row.startswith('kernels') else format_bytes(int(value))
