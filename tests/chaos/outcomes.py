"""What happened in each case, and the table and the JSON that say so."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

TROUBLES = ('abort', 'hang', 'traceback')


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One case: whether everything that was checked held."""

    kind: str  # 'kill', 'signal', 'disk', ...
    case: str
    seconds: float
    exit_code: int | None  # of the last process of the case; negative: ended by that signal; None: it did not end
    detail: str = ''  # what did not hold; '' = everything held
    trouble: Literal['', 'abort', 'hang', 'traceback'] = ''
    directory: str = ''  # what the case left, kept where it failed

    @property
    def verdict(self) -> Literal['held', 'failed']:
        return 'failed' if self.detail or self.trouble else 'held'


@dataclasses.dataclass(frozen=True)
class Coverage:
    """How much of a kind ran."""

    ran: int
    minimum: int  # what a complete run covers; 0 = the cases of this kind could not be loaded

    @property
    def complete(self) -> bool:
        return self.ran >= self.minimum > 0


def count(outcomes: Sequence[Outcome], kind: str) -> dict[str, int]:
    """held, failed, aborts, hangs, tracebacks of one kind."""
    of_kind = [outcome for outcome in outcomes if outcome.kind == kind]
    verdicts = collections.Counter(outcome.verdict for outcome in of_kind)
    troubles: collections.Counter[str] = collections.Counter(outcome.trouble for outcome in of_kind)
    return {'held': verdicts['held'], 'failed': verdicts['failed']} | {f'{name}s': troubles[name] for name in TROUBLES}


def table(outcomes: Sequence[Outcome], coverage: Mapping[str, Coverage]) -> str:
    """Markdown, a line per kind."""
    lines = [
        '| kind | covered | held | failed | aborts | hangs | unexpected tracebacks |',
        '|---|---|---|---|---|---|---|',
    ]
    for kind, covered in coverage.items():
        numbers = ' | '.join(str(number) for number in count(outcomes, kind).values())
        lines.append(f'| {kind} | {covered.ran} of {covered.minimum} | {numbers} |')
    return '\n'.join(lines)


def all_held(outcomes: Sequence[Outcome], coverage: Mapping[str, Coverage]) -> bool:
    """Whether every check held and at least one case of each kind ran."""
    return all(outcome.verdict == 'held' for outcome in outcomes) and all(c.ran > 0 for c in coverage.values())


def record(outcomes: Sequence[Outcome], coverage: Mapping[str, Coverage], facts: Mapping[str, Any]) -> dict[str, Any]:
    """What --json writes."""
    return {
        **facts,
        'passed': all_held(outcomes, coverage),
        'complete': all(covered.complete for covered in coverage.values()),
        'kinds': {
            kind: {'ran': covered.ran, 'minimum': covered.minimum, **count(outcomes, kind)}
            for kind, covered in coverage.items()
        },
        'outcomes': [dataclasses.asdict(outcome) | {'verdict': outcome.verdict} for outcome in outcomes],
    }
