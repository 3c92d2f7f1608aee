"""The page of a sweep, results.md: unfinished arms first, then means over seeds, paired differences, and every arm."""

from __future__ import annotations

import math
import pathlib
import shlex
from collections.abc import Sequence

from areal_jax.app.sweep.paired import LEAST_R, Bounds, PairedDifference, Pairing, describe_pairing
from areal_jax.app.sweep.sweep_results import ArmResult, Comparison, GroupResult, Results
from areal_jax.installation import find_command
from areal_jax.report.statistics import Interval
from areal_jax.telemetry.progress import format_number

FILE = 'results.md'
_SHOWN = 12  # characters of a hash
_MOST_GROUPS = 12  # on the last screen


def render_page(results: Results, pictures: Sequence[str]) -> str:
    """Markdown; `pictures` are paths relative to the page."""
    sections = [
        '# Results of a sweep',
        _what_ran(results),
        *_unfinished(results),
        '## Means over seeds',
        _means(results),
        'Means with 95% intervals (Student), over the seeds that have finished.',
        *_differences(results),
        *(f'![{picture}]({picture})' for picture in pictures),
        '## Arms',
        render_table(
            ('arm', 'seed', 'state', *(e.name for e in results.endpoints), 'weights'),
            [_arm_row(results, result) for result in results.arms],
        ),
        '\n'.join(f'- `{endpoint.name}`: {endpoint.meaning}' for endpoint in results.endpoints),
    ]
    return '\n\n'.join(section for section in sections if section) + '\n'


def summarize_sweep(results: Results, workdir: pathlib.Path) -> list[str]:
    """Returns the last screen's lines: what has finished, the first outcome by group, the page, the next command."""
    finished = [result for result in results.arms if result.state.is_finished]
    lines = [f'arms      {len(finished)} of {len(results.arms)} finished']
    if results.outcomes:
        outcome = results.outcomes[0].name
        compared = {one.group: one.difference for one in results.comparisons if one.endpoint == outcome}
        lines.append(f'outcome   {outcome}, mean and 95% interval; difference to {results.groups[0].name}')
        for group in results.groups[:_MOST_GROUPS]:
            difference = compared.get(group.name)
            told = '' if difference is None else f'; {_signed(difference.mean)} {_bounds(difference.t)}'
            lines.append(f'          {group.name}: {_interval(group.means.get(outcome))}{told}')
        if (rest := len(results.groups) - _MOST_GROUPS) > 0:
            lines.append(f'          and {rest} groups more')
    lines.append(f'report    {workdir / FILE}')
    if len(finished) < len(results.arms):
        lines.append('next      the same command goes on')
    elif len(finished) > 1:
        named = ' '.join(shlex.quote(str(result.arm.workdir)) for result in _pick_ends(finished))
        lines.append(f'next      {find_command("areal-report")} --compare {named}')
    return lines


def _pick_ends(finished: Sequence[ArmResult]) -> tuple[ArmResult, ArmResult]:
    return finished[0], finished[-1]


def describe_missing(results: Sequence[ArmResult]) -> str:
    """'2 of 6 arms have not finished: a (with code 2: ...), b (it was stopped)'; '' where all have."""
    missing = [result for result in results if not result.state.is_finished]
    if not missing:
        return ''
    named = ', '.join(f'{result.arm.name} ({result.state.reason or "not started"})' for result in missing)
    return f'{len(missing)} of {len(results)} arms {"has" if len(missing) == 1 else "have"} not finished: {named}'


def _what_ran(results: Results) -> str:
    finished = sum(result.state.is_finished for result in results.arms)
    seeds = len({result.arm.seed for result in results.arms})
    return (
        f'`{results.source}`: {len(results.arms)} arms, of which {finished} have finished; {len(results.groups)} '
        f'groups of arms that differ in seed only, {seeds} seeds.'
    )


def _unfinished(results: Results) -> list[str]:
    """Arms that have not finished, and finished ones that lack something."""
    rows = [
        (
            result.arm.name,
            result.state.word,
            f'{result.state.updates} of {result.arm.config.run.steps}',
            result.state.reason,
        )
        for result in results.arms
        if result.state.reason or not result.state.is_finished
    ]
    if not rows:
        return []
    return [
        '## Arms that have not finished, or trained nothing',
        render_table(('arm', 'state', 'updates', 'why'), rows),
        'No mean and no difference below has an unfinished arm in it.',
    ]


def _means(results: Results) -> str:
    rows = [
        (group.name, _seeds(group), *(_interval(group.means.get(e.name)) for e in results.endpoints))
        for group in results.groups
    ]
    return render_table(('group', 'seeds', *(e.name for e in results.endpoints)), rows)


def _differences(results: Results) -> list[str]:
    if not results.comparisons:
        return []
    first = results.groups[0].name
    sections = [
        f'## Differences to {first}, paired by seed',
        f'Group minus {first} on the same seeds, which have prompts, initial weights and sampling noise in common. t: '
        '95% interval of Student; BCa: of the bias-corrected and accelerated bootstrap, from 5 seeds on; p: Student, '
        'two-sided, and after Holm over the groups. r: correlation over seeds; the standard error is smaller than with '
        'seeds of its own for each arm by the factor in the last column.',
    ]
    for endpoint in results.outcomes:
        found = [comparison for comparison in results.comparisons if comparison.endpoint == endpoint.name]
        if not found:
            continue
        head = ('group', 'seeds', 'difference', 't', 'BCa', 'p', 'p (Holm)', 'r', 'standard error smaller by')
        sections += [f'### {endpoint.name}', render_table(head, [_difference_row(comparison) for comparison in found])]
        sections += [describe_pairing([c.difference.pairing for c in found if c.difference.pairing])]
    return sections


def _difference_row(comparison: Comparison) -> tuple[str, ...]:
    found = comparison.difference
    return (
        *(comparison.group, str(found.n), _signed(found.mean), _bounds(found.t), _bounds(found.bootstrap)),
        *(_probability(found.p), _probability(comparison.holm_p)),
        *_pairing_cells(found),
    )


def _pairing_cells(found: PairedDifference) -> tuple[str, str]:
    pairing = found.pairing
    return ('-', '-') if pairing is None else (f'{pairing.r:.2f}', _gain(pairing))


def _gain(pairing: Pairing) -> str:
    if pairing.r < LEAST_R:
        return 'pairing buys nothing'
    return 'equal differences' if math.isinf(pairing.error_factor) else f'{pairing.error_factor:.3g} times'


def _arm_row(results: Results, result: ArmResult) -> tuple[str, ...]:
    values = (result.values.get(endpoint.name) for endpoint in results.endpoints)
    weights = f'`{result.weights[:_SHOWN]}`' if result.weights else '-'
    return result.arm.name, str(result.arm.seed), result.state.word, *(_number(value) for value in values), weights


def _seeds(group: GroupResult) -> str:
    finished, all_ = len(group.finished), len(group.arms)
    return str(all_) if finished == all_ else f'{finished} of {all_}'


def _interval(interval: Interval | None) -> str:
    if interval is None:
        return '-'
    if interval.low is None or interval.high is None:
        return _number(interval.mean)
    return f'{_number(interval.mean)} [{_number(interval.low)}, {_number(interval.high)}]'


def _bounds(bounds: Bounds | None) -> str:
    return '-' if bounds is None else f'[{_signed(bounds.low)}, {_signed(bounds.high)}]'


def _probability(p: float | None) -> str:
    return '-' if p is None else '< 0.001' if p < 0.001 else f'{p:.3f}'


def _number(value: float | None) -> str:
    """Three decimals below 10, as rewards and scores need them."""
    return f'{value:.3f}' if value is not None and abs(value) < 10 else format_number(value)


def _signed(value: float) -> str:
    return f'{value:+.3f}' if abs(value) < 10 else f'{value:+.4g}'


def render_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ['---'] * len(head), *rows]
    return '\n'.join(f'| {" | ".join(cell.replace("|", "/") for cell in line)} |' for line in lines)
