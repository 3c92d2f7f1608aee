"""The fates of all generated tokens, for the report. See telemetry/token_ledger.py."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from areal_jax.control.buffer import BY_REWARD
from areal_jax.events.schema import Event
from areal_jax.labels import SCORED
from areal_jax.report import aggregates
from areal_jax.report import report_keys as contents
from areal_jax.report.aggregates import Metrics
from areal_jax.report.event_log import outside_evaluation
from areal_jax.report.pages.blocks import Table
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import Line, counts, number
from areal_jax.telemetry.progress import format_number, format_percent
from areal_jax.telemetry.token_ledger import DROPPED, FIRST_VERSION, IN_BATCH, UNFINISHED, TokenLedger, tell_fates
from areal_jax.types import NOT_GENERATED


def token_age(metrics: Metrics) -> contents.MeanMax:
    """Age of the trained tokens in versions: from the histograms, or from the means if no update has a histogram."""
    tokens = _by_publications(metrics)
    if not (trained := sum(tokens.values())):
        mean = aggregates.weighted_mean(metrics, names.TOKEN_AGE_MEAN, names.TOKENS_TRAINED)
        return {'mean': mean, 'max': aggregates.largest(metrics, names.TOKEN_AGE_MAX)}
    mean = sum(age * count for age, count in tokens.items()) / trained
    return {'mean': mean, 'max': max(tokens)}


def token_age_steps(metrics: Metrics) -> contents.StepAge:
    """Age of the trained tokens in optimizer steps, and the part of it that lies inside their own update."""
    weighted = lambda name: aggregates.weighted_mean(metrics, name, names.TOKENS_TRAINED)
    return {
        'mean': weighted(names.STEP_AGE_MEAN),
        'max': aggregates.largest(metrics, names.STEP_AGE_MAX),
        'inside_mean': weighted(names.STEPS_INSIDE_MEAN),
        'inside_max': aggregates.largest(metrics, names.STEPS_INSIDE_MAX),
    }


def age_histograms(metrics: Metrics) -> contents.AgeHistograms:
    """Trained tokens by age when their batch was formed."""
    return {'publications': _pairs(_by_publications(metrics)), 'steps': _pairs(_by_steps(metrics))}


def _by_publications(metrics: Metrics) -> dict[int, int]:
    tokens: collections.Counter[int] = collections.Counter()
    for line in metrics:
        tokens.update({age: int(n) for age, n in enumerate(counts(line, names.TOKEN_AGE_HISTOGRAM)) if n})
    return tokens


def _by_steps(metrics: Metrics) -> dict[int, int]:
    """Trained tokens by age in optimizer steps; age a spans the steps of the a updates before the token's own.

    Empty if the steps of an update are unknown.
    """
    histograms = [counts(line, names.TOKEN_AGE_HISTOGRAM) for line in metrics]
    steps = [number(line, names.OPTIMIZER_STEPS) for line in metrics]
    applied = [int(count) for count in steps if count is not None]
    if len(applied) < len(steps) or any(len(ages) > version + 1 for version, ages in enumerate(histograms)):
        return {}
    before = [0, *itertools.accumulate(applied)]  # optimizer steps before version 0, 1, ...
    tokens: collections.Counter[int] = collections.Counter()
    for version, ages in enumerate(histograms):  # at which the batch was formed
        for age, count in enumerate(ages):
            if count:
                tokens[before[version] - before[version - age]] += int(count)
    return tokens


def _pairs(tokens: Mapping[int, int]) -> list[list[int]]:
    return [[age, tokens[age]] for age in sorted(tokens)]


def token_fates(events: Sequence[Event], metrics: Metrics, *, finished: bool) -> contents.TokenFates | None:
    """The ledger of the whole run; None if an earlier program wrote a part of the run.

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


def tabulate_fates(fates: contents.TokenFates | None) -> Table:
    """Returns the page's table of fates; empty without a ledger."""
    rows: list[tuple[str, ...]] = []
    if fates:
        generated = fates['generated']
        rows.append(('generated', str(generated), '', ''))
        for fate, tokens in fates['fates'].items():
            share = format_percent(tokens / generated) if generated else '-'
            rows.append((fate.replace('/', ': '), str(tokens), share, _mean_age(fates['by_age'].get(fate, ()))))
    return Table(('fate', 'tokens', 'share', 'age, mean'), rows, 'Token ledger')


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


# Lengths and rewards of generated, trained, masked and dropped answers, side by side.
#
# If the answers that leave the loop are longer or better than the trained answers, the policy learns from a biased
# sample of its answers. An answer counts for each fate with the share of its tokens that have met the fate.


_GENERATED, _DROPPED = 'generated', 'dropped'
_LEFT_OUT = ('masked', 'dropped')  # fates that depend on how long an answer took
# together with 'filtered': fates that depend on the rewards by their definition
_BY_REWARD = tuple(f'dropped: {reason}' for reason in BY_REWARD)
# √(-ln(α / 2) / 2) with α = 1%: N. Smirnov's asymptotic bound of the distance between two samples of one distribution
_CRITICAL = math.sqrt(-math.log(0.01 / 2) / 2)
_Values: TypeAlias = Callable[[Sequence['_Share']], tuple[np.ndarray, np.ndarray]]  # values and weights


@dataclasses.dataclass
class _Answer:
    tokens: dict[int, int]  # by policy version
    reward: float | None = None


@dataclasses.dataclass(frozen=True)
class _Share:
    """A part of an answer that has met a fate."""

    draw: int
    length: int  # tokens of the whole answer
    reward: float | None
    weight: float  # above 0, at most 1


def censoring(events: Sequence[Event], metrics: Metrics) -> contents.Censoring | None:
    """The spread of each fate; None if an earlier program wrote a part of the run, or no answer has a fate."""
    if not has_lengths(events) or not tell_fates(metrics):
        return None
    shares: dict[str, list[_Share]] = collections.defaultdict(list)
    for fate, share in _shares(list(outside_evaluation(events)), metrics):
        shares[fate].append(share)
    everything = [share for parts in shares.values() for share in parts]
    if not everything:
        return None
    shares[_GENERATED] = everything
    by_reason = [fate for fate in shares if fate.startswith(_DROPPED)]
    shares[_DROPPED] = [share for fate in by_reason for share in shares[fate]]
    order = (_GENERATED, *IN_BATCH, _DROPPED)
    left_out = [share for fate in _LEFT_OUT for share in shares[fate]]
    lost_by_time = [share for fate in ('masked', *by_reason) if fate not in _BY_REWARD for share in shares[fate]]
    return {
        'spreads': {fate: _spread(shares[fate], everything) for fate in order if shares[fate]},
        'length_bias': _compare(shares['trained'], left_out, _lengths),
        'reward_bias': _compare(shares['trained'], lost_by_time, _rewards),
    }


def ks_distance(a: np.ndarray, b: np.ndarray, a_weights: np.ndarray, b_weights: np.ndarray) -> float:
    """Largest difference between the distribution functions of two weighted samples, [n] and [m] (Smirnov, 1939)."""
    values, places = np.unique(np.concatenate([a, b]), return_inverse=True)
    masses = (
        np.bincount(places[: len(a)], a_weights, len(values)) / a_weights.sum(),
        np.bincount(places[len(a) :], b_weights, len(values)) / b_weights.sum(),
    )
    return float(np.abs(np.cumsum(masses[0] - masses[1])).max())


def tabulate_censoring(found: contents.Censoring | None) -> Table:
    """Returns the page's table of spreads; empty where no answer has a fate."""
    columns = ('answers', 'length_mean', 'length_distance', 'reward_mean', 'reward_distance')
    rows = [
        (fate, *(format_number(spread[column]) for column in columns))  # type: ignore[literal-required]
        for fate, spread in (found['spreads'].items() if found else ())
    ]
    lengths, rewards = ('length, mean', 'length, KS to generated'), ('reward, mean', 'reward, KS to generated')
    return Table(('answers', 'number', *lengths, *rewards), rows, 'Censoring')


def warn_of_censoring(found: contents.Censoring | None) -> str:
    """The sentence on lost answers that differ from the trained ones by more than chance; '' if no difference shows."""
    if found is None:
        return ''
    sentences = [
        f'trained answers had {what} of {format_number(bias["trained_mean"])} on average, those masked or dropped '
        f'{format_number(bias["left_out_mean"])} (KS distance {bias["distance"]:.2f}, by chance at most '
        f'{bias["critical"]:.2f})'
        for bias, what in ((found['length_bias'], 'a length'), (found['reward_bias'], 'a reward'))
        if bias and bias['distance'] > bias['critical']
    ]
    if not sentences:
        return ''
    return f'The trained data are not a fair sample of what was generated: {"; ".join(sentences)}.'


def describe_censoring(found: contents.Censoring | None) -> str:
    """The result of comparing trained answers with masked and dropped ones, in a sentence; '' if nothing is known."""
    if found is None:
        return ''
    if not found['length_bias']:
        return 'Nothing that was trained can be compared with what was masked or dropped.'
    return warn_of_censoring(found) or (
        'Trained answers differ from those that were masked or dropped by no more than chance explains.'
    )


def _shares(events: Sequence[Event], metrics: Metrics) -> Iterator[tuple[str, _Share]]:
    """Yields (fate, part of an answer) for every answer whose fate is decided."""
    answers: dict[int, dict[int, _Answer]] = collections.defaultdict(dict)  # by draw and sample
    lines = {int(number(line, names.STEP) or 0): line for line in metrics}
    for event in events:
        if event['kind'] == 'finish':
            tokens: collections.Counter[int] = collections.Counter()
            for version, length in zip(event['versions'], event.get('lengths', ()), strict=True):
                if version != NOT_GENERATED:
                    tokens[version] += length
            answers[event['draw']][event['sample']] = _Answer(tokens)
        elif event['kind'] == 'reward' and event['label'] in SCORED:
            answers[event['draw']][event['sample']].reward = event['value']
        elif event['kind'] == 'drop':
            group = answers.pop(event['draw'], {})
            yield from _whole(f'{_DROPPED}: {event["reason"]}', event['draw'], group.values())
        elif event['kind'] == 'buffer' and event['partial']:
            group = answers[event['draw']]
            failed = [sample for sample, answer in group.items() if answer.reward is None]
            yield from _whole(f'{_DROPPED}: verifier_failed', event['draw'], [group.pop(sample) for sample in failed])
        elif event['kind'] == 'consume' and event['update'] in lines:
            for draw in event['draws']:
                yield from _in_batch(draw, answers.pop(draw, {}), event['update'] - 1, lines[event['update']])


def _whole(fate: str, draw: int, answers: Iterable[_Answer]) -> Iterator[tuple[str, _Share]]:
    for answer in answers:
        if length := sum(answer.tokens.values()):
            yield fate, _Share(draw, length, answer.reward, 1.0)


def _in_batch(draw: int, group: Mapping[int, _Answer], version: int, line: Line) -> Iterator[tuple[str, _Share]]:
    """Yields the fates of the answers of a group, from the fates of the batch's tokens by age."""
    is_filtered = (
        len({answer.reward for answer in group.values()}) <= 1 and sum(counts(line, names.FILTERED_BY_AGE)) > 0
    )
    if is_filtered:
        yield from _whole('filtered', draw, group.values())
        return
    by_age = {fate: counts(line, name) for fate, name in IN_BATCH.items() if fate != 'filtered'}
    for answer in group.values():
        length, met = sum(answer.tokens.values()), dict.fromkeys(by_age, 0.0)
        for born, tokens in answer.tokens.items():
            age = version - born
            batch = {fate: ages[age] if age < len(ages) else 0.0 for fate, ages in by_age.items()}
            for fate, count in batch.items():  # within a batch, all tokens of one age mostly share one fate
                met[fate] += tokens * count / (sum(batch.values()) or 1.0)
        for fate, tokens_met in met.items():
            if tokens_met:
                yield fate, _Share(draw, length, answer.reward, tokens_met / length)


def _lengths(shares: Sequence[_Share]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([s.length for s in shares], np.float64), np.array([s.weight for s in shares])


def _rewards(shares: Sequence[_Share]) -> tuple[np.ndarray, np.ndarray]:
    scored = [(s.reward, s.weight) for s in shares if s.reward is not None]
    return np.array([reward for reward, _ in scored], np.float64), np.array([weight for _, weight in scored])


def _spread(shares: Sequence[_Share], everything: Sequence[_Share]) -> contents.Spread:
    lengths, rewards = (_lengths(shares), _lengths(everything)), (_rewards(shares), _rewards(everything))
    return {
        'answers': float(sum(share.weight for share in shares)),
        'length_mean': _mean(*lengths[0]),
        'length_distance': _distance(*lengths),
        'reward_mean': _mean(*rewards[0]),
        'reward_distance': _distance(*rewards),
    }


def _mean(values: np.ndarray, weights: np.ndarray) -> float | None:
    return float(np.average(values, weights=weights)) if len(values) else None


def _distance(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]) -> float | None:
    if not len(one[0]) or not len(other[0]):
        return None
    return ks_distance(one[0], other[0], one[1], other[1])


def _compare(trained: Sequence[_Share], left_out: Sequence[_Share], values_of: _Values) -> contents.Bias | None:
    """Compares trained with left-out answers. n counts groups: the answers of a group are not independent."""
    one, other = values_of(trained), values_of(left_out)
    distance = _distance(one, other)
    trained_mean, left_out_mean = _mean(*one), _mean(*other)
    if distance is None or trained_mean is None or left_out_mean is None:
        return None
    n, m = len({share.draw for share in trained}), len({share.draw for share in left_out})
    return {
        'distance': distance,
        'critical': _CRITICAL * math.sqrt((n + m) / (n * m)),
        'trained_mean': trained_mean,
        'left_out_mean': left_out_mean,
    }
