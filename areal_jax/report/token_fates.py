"""What became of every token that was generated, as the report tells it. See token_ledger.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from areal_jax.events.schema import Event
from areal_jax.report import report_keys as contents
from areal_jax.report.aggregates import Metrics
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import number
from areal_jax.telemetry.progress import format_number, format_percent
from areal_jax.telemetry.token_ledger import DROPPED, FIRST_VERSION, IN_BATCH, UNFINISHED, TokenLedger, tell_fates


def token_fates(events: Sequence[Event], metrics: Metrics, *, finished: bool) -> contents.TokenFates | None:
    """The ledger of the whole run; None where an earlier program wrote a part of it.

    `finished`: every group of the run was trained or dropped, so that no token may be without a fate.
    """
    if not has_lengths(events) or not tell_fates(metrics):
        return None
    ledger = TokenLedger(by_version=True)
    for event in events:
        ledger.apply(event)
    for line in metrics:
        ledger.note_update(int(number(line, names.STEP) or 0), line)
    fates = [*IN_BATCH, *sorted(fate for fate in ledger.fates if fate.startswith(DROPPED))]
    from_servers = any(event['kind'] == 'receive' for event in events)
    assert ledger.versions is not None
    versions = ledger.versions | {UNFINISHED: ledger.unfinished_versions()}
    return {
        'generated': ledger.generated,
        'fates': {fate: ledger.tokens(fate) for fate in fates} | {UNFINISHED: ledger.unfinished},
        'by_age': {fate: _as_list(ledger.fates.get(fate, {})) for fate in fates},
        'by_version': None
        if from_servers
        else {fate: _as_list(versions.get(fate, {})) for fate in (*fates, UNFINISHED)},
        'fault': _find_fault(ledger, finished),
    }


def has_lengths(events: Sequence[Event]) -> bool:
    """Whether every part of the log was written by a program that logs the lengths of segments."""
    starts = [event['version'] for event in events if event['kind'] == 'log']
    return bool(starts) and min(starts) >= FIRST_VERSION


def fate_rows(fates: contents.TokenFates | None) -> list[tuple[str, ...]]:
    """Of the page's table: fate, tokens, share, mean age."""
    if fates is None:
        return []
    generated = fates['generated']
    rows: list[tuple[str, ...]] = [('generated', str(generated), '', '')]
    for fate, tokens in fates['fates'].items():
        share = format_percent(tokens / generated) if generated else '-'
        rows.append((fate.replace('/', ': '), str(tokens), share, _mean_age(fates['by_age'].get(fate, ()))))
    return rows


def _mean_age(by_age: Sequence[int]) -> str:
    tokens = sum(by_age)
    return format_number(sum(age * count for age, count in enumerate(by_age)) / tokens) if tokens else '-'


def _find_fault(ledger: TokenLedger, finished: bool) -> str:
    if ledger.violations:
        return ledger.violations[0]
    if ledger.unfinished < 0 or (finished and ledger.unfinished):
        return f'{ledger.unfinished} generated tokens have no fate'
    return ''


def _as_list(tokens: Mapping[int, int]) -> list[int]:
    return [tokens.get(key, 0) for key in range(max(tokens, default=-1) + 1)]
