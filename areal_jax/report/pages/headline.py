"""The headline of the report of a run: six questions with their answers, as tiles and as lines on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from areal_jax.report.limit import format_interval
from areal_jax.report.pages.blocks import Tile, Tone
from areal_jax.report.report_keys import Interval, Report
from areal_jax.telemetry.facts import HELD_OUT_SCORES
from areal_jax.telemetry.progress import format_bytes, format_gibibytes, format_number, format_percent

LABEL = 10  # characters of the names of the lines of a summary
_ROUNDING = {'float32': 1e-4, '16 bits': 0.03}  # nats: largest mean mismatch that rounding explains
_ENOUGH_SAMPLES = 0.5  # share that a correction leaves
_NEAR_LIMIT, _FAR_FROM_LIMIT = 0.9, 0.7  # ideal time / achieved time
_AT_BOUND = 0.9  # mean age / eta


def tell_headline(report: Report) -> list[Tile]:
    """The tiles in the order of the page."""
    return [_gain(report), _speed(report), _age(report), _agreement(report), _memory(report), _data(report)]


def summarize_run(report: Report, width: int) -> list[str]:
    """Returns six lines of at most `width` characters: progress, gain, speed, age, mismatch, warnings."""
    gain, speed, age, agreement, *_ = tell_headline(report)
    seconds = '' if report['wall_seconds'] is None else f', {format_number(report["wall_seconds"])} s of wall time'
    warnings = report['warnings']
    learnt = f'{gain.reading} Gain {gain.value}, {", ".join(gain.details)}'
    texts = {
        'run': f'{describe_state(report)[0]}{seconds}',
        'learnt': _tell(gain) if gain.tone == 'unknown' else learnt,
        'speed': _tell(speed),
        'age': _tell(age),
        'mismatch': _tell(agreement),
        'warnings': f'{len(warnings)}, the first one: {warnings[0]}' if warnings else 'none',
    }
    return [_cut(f'{label:<{LABEL}}{text}', width) for label, text in texts.items()]


def _tell(tile: Tile) -> str:
    """The answer with its first detail, then the reading; only the reading if nothing was measured."""
    if tile.value == '-':
        return tile.reading
    return f'{", ".join((f"{tile.value} {tile.unit}", *tile.details[:1]))}. {tile.reading}'


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f'{line[: width - 3].rpartition(" ")[0]} ...'


def describe_state(report: Report) -> tuple[str, Tone]:
    """The progress of the run in a few words, and its tone."""
    planned = report['planned_steps']
    updates = f'{report["steps"]} of {planned} updates' if planned is not None else f'{report["steps"]} updates'
    if report['finished']:
        return f'finished, {updates}', 'good'
    return (f'under way, {updates}', 'fair') if report['running'] else (f'not finished, {updates}', 'bad')


def _gain(report: Report) -> Tile:
    if report['simulation']:
        reading = 'A simulation has no weights, and its rewards are drawn.'
        return Tile('gain', 'Did it learn?', '-', '', (), reading, 'unknown', 'learning')
    accuracy = report['accuracy']
    details: list[str] = []
    reading, tone = '', cast(Tone, 'unknown')
    gain = accuracy['sampled']['gain'] if accuracy else None
    if accuracy:
        for kind in ('sampled', 'greedy'):
            before, after = accuracy[kind]['before'], accuracy[kind]['after']
            if before or after:
                details.append(f'{kind} {_mean(before)} → {_mean(after)}')
    if gain:
        value, unit = format(gain['mean'], '+.3f'), 'held-out accuracy, sampled'
        details.insert(0, f'95% interval {format_interval(gain, "+", mean=False)}')
        reading, tone = _read_gain(gain)
    elif report['evaluation_curve']:
        row = report['evaluation_curve'][-1]
        score = row['sampled'] or row['greedy']
        value, unit = _mean(score), f'held-out accuracy of version {row["version"]}'
        details.insert(0, f'95% interval {format_interval(score, mean=False)}')
        reading = 'The gain needs an evaluation before and one after training.'
    elif accuracy and (before := accuracy['sampled']['before'] or accuracy['greedy']['before']):
        value, unit = _mean(before), 'held-out accuracy before training'
        details.insert(0, f'95% interval {format_interval(before, mean=False)}')
        reading = 'The gain needs an evaluation after training, which this run has not made yet.'
    else:
        reward = report['reward']
        value, unit = format_number(reward['last']), 'reward of the last batch'
        details.insert(0, f'first batch {format_number(reward["first"])}')
        reading = (
            'No evaluation on held-out problems has finished yet; the reward is that of the problems trained on.'
            if lacks_evaluation(report)
            else 'No gain on held-out problems was measured; the reward is that of the problems trained on.'
        )
    return Tile('gain', 'Did it learn?', value, unit, tuple(details), reading, tone, 'learning')


def lacks_evaluation(report: Report) -> bool:
    """Whether the run is unfinished and still lacks an evaluation that its config asks for."""
    return any(text.startswith(HELD_OUT_SCORES) for text in report['missing'])


def _read_gain(gain: Interval) -> tuple[str, Tone]:
    low, high = gain['low'], gain['high']
    if low is None or high is None:
        return 'Too few problems for an interval.', 'unknown'
    if low > 0:
        return 'Yes: the interval of the gain lies above 0.', 'good'
    if high < 0:
        return 'It got worse: the interval of the gain lies below 0.', 'bad'
    return 'Not shown: the interval of the gain contains 0.', 'fair'


def _speed(report: Report) -> Tile:
    time, busy, rate = report['time'], report['busy'], report['throughput']
    ideal, achieved = time['ideal'], time['achieved']
    details = (
        f'{format_number(achieved)} s an update, limit {format_number(ideal)} s',
        f'lanes occupied: rollout {format_percent(busy["rollout"])}, learner {format_percent(busy["learner"])}',
        f'{format_number(rate["generate_tokens_per_second"])} tokens/s generated, '
        f'{format_number(rate["train_tokens_per_second"])} trained',
    )
    question, name, section = 'How fast, against the limit?', 'speed', 'speed'
    if not ideal or not achieved:
        return Tile(name, question, '-', '', details, report['cause_of_gap'], 'unknown', section)
    share = ideal / achieved
    tone: Tone = 'good' if share >= _NEAR_LIMIT else 'fair' if share >= _FAR_FROM_LIMIT else 'bad'
    gap = report['cause_of_gap'].partition('): ')[2]
    reading = f'{gap[:1].upper()}{gap[1:]}' if gap else report['cause_of_gap']
    return Tile(name, question, format_percent(share), 'of the limit', details, reading, tone, section)


def _age(report: Report) -> Tile:
    age, eta, steps = report['token_age'], report['eta'], report['token_age_steps']
    reading, tone = _read_age(report)
    bound = '' if report['schedule'] != 'natural' else f', eta {"unbounded" if eta is None else format_number(eta)}'
    details = (
        f'oldest {format_number(age["max"])}{bound}',
        f'in optimizer steps {format_number(steps["mean"])}, oldest {format_number(steps["max"])}',
    )
    unit = 'versions, mean of the trained tokens'
    return Tile('age', 'How old is the data?', format_number(age['mean']), unit, details, reading, tone, 'staleness')


def _read_age(report: Report) -> tuple[str, Tone]:
    mean, oldest, eta = report['token_age']['mean'], report['token_age']['max'], report['eta']
    if mean is None or oldest is None:
        return 'No update trained a token.', 'unknown'
    if report['schedule'] != 'natural':
        return f'The schedule {report["schedule"]} sets the age.', 'good'
    if oldest == 0:
        return 'On-policy: every token is of the weights that it trains.', 'good'
    if eta is None:
        return 'Nothing bounds the age: eta is unbounded.', 'fair'
    if oldest > eta:
        return 'Some tokens are older than eta, which bounds groups; staleness.max_token_age bounds tokens.', 'fair'
    if mean >= _AT_BOUND * eta:
        return 'At its bound: generation runs ahead of training until eta holds it back.', 'fair'
    return 'Within the bound.', 'good'


def _agreement(report: Report) -> Tile:
    found = report['mismatch']
    mean = found['mean']
    question, unit = 'Do engine and learner agree?', 'nats, mean mismatch of log-probs'
    if mean is None:
        reading = 'Not measured: no update held tokens of the version that it trained.'
        return Tile('agreement', question, '-', '', (), reading, 'unknown', 'agreement')
    details = (
        f'largest {format_number(found["max"])}',
        f'{format_percent(found["exact_share"])} exactly equal (n = {found["n"]})',
    )
    tone: Tone
    quantized = found.get('quantized')
    reading, tone = 'More than rounding explains: the ratios of all old tokens are wrong by as much.', 'bad'
    if mean <= _ROUNDING['16 bits']:
        reading, tone = 'The size of rounding to 16 bits; too large if everything is float32.', 'fair'
    if mean <= _ROUNDING['float32']:
        reading, tone = 'Yes: the size of rounding in float32.', 'good'
    if quantized:
        size = format_percent(quantized['effective_sample_size'])
        reading = f'Engines decode in 8 bits: a decoupled objective corrects this, with {size} of the samples left.'
        tone = 'fair' if (quantized['effective_sample_size'] or 0.0) >= _ENOUGH_SAMPLES else 'bad'
    return Tile('agreement', question, format_number(mean), unit, details, reading, tone, 'agreement')


def _memory(report: Report) -> Tile:
    size, cache, devices = report['peak_memory_bytes'], report['kv_cache_bytes'], report['hardware'].get('devices')
    details = (f'KV cache of an engine {format_bytes(cache)}',) if cache is not None else ()
    if isinstance(devices, list | tuple) and devices and all(str(device).startswith('cpu') for device in devices):
        where = 'The devices are the processor, so their memory is part of it.'
    else:
        where = 'Memory of the host; that of the devices is not in it.'
    value, unit = ('-', '') if size is None else (format_gibibytes(size), 'peak of the process tree')
    reading = 'The peak was not recorded.' if size is None else where
    return Tile('memory', 'How much memory?', value, unit, details, reading, 'unknown', 'speed')


def _data(report: Report) -> Tile:
    fates, question, unit = report['token_fates'], 'What became of the tokens?', 'of the generated tokens trained'
    generated, trained = report['tokens']['generated'], report['tokens']['trained']
    details = [f'{format_number(trained)} of {generated} tokens']
    if not fates or not fates['generated']:
        reading = 'The log has no ledger of the tokens.' if fates is None else 'No token was generated.'
        return Tile('data', question, '-', '', tuple(details), reading, 'unknown', 'ledger')
    shares = {fate: tokens / fates['generated'] for fate, tokens in fates['fates'].items()}
    details += [f'{fate} {format_percent(share)}' for fate, share in _largest(shares)]
    reading = f'The ledger does not close: {fates["fault"]}.' if fates['fault'] else 'The ledger closes.'
    tone: Tone = 'bad' if fates['fault'] else 'good'
    value = format_percent(shares.get('trained', 0.0))
    return Tile('data', question, value, unit, tuple(details), reading, tone, 'ledger')


def _largest(shares: Mapping[str, float]) -> list[tuple[str, float]]:
    """The two largest fates besides `trained`, of at least one percent."""
    others = [(fate, share) for fate, share in shares.items() if fate != 'trained' and share >= 0.01]
    return sorted(others, key=lambda other: -other[1])[:2]


def _mean(interval: Interval | None) -> str:
    return '-' if interval is None else f'{interval["mean"]:.3f}'
