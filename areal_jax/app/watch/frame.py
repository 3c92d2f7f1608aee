"""One frame of the live view of a run: lines of text for a terminal of any size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from areal_jax.app.watch.live_run import LiveRun, ShortAnswer
from areal_jax.app.workdir.run_list import FAILED, FINISHED, NEVER_BEGAN, RUNNING
from areal_jax.lanes import DISK, LEARNER, PUBLISH, REWARD, is_engine_lane, is_upkeep_lane, lane_group
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import Line, counts, number
from areal_jax.telemetry.progress import format_duration, format_number, format_percent
from areal_jax.telemetry.rollout_views import cut_text, escape, show_number

if TYPE_CHECKING:
    from rich.text import Text

Part: TypeAlias = tuple[str, str]  # text and rich style
Row: TypeAlias = list[Part]

LEAST_WIDTH, LEAST_HEIGHT = 40, 12
_TALL = 32  # lines from which sections are separated and have more detail
_LABEL = 10  # columns of the first column
_BAR = 24  # of a bar at most
_LEAST_ANSWERS = 4
_LANES = ('engine', LEARNER, REWARD, PUBLISH, DISK)  # shown first, in this order
_TONES = {RUNNING: 'bold green', FINISHED: 'bold green', FAILED: 'bold red', NEVER_BEGAN: 'bold yellow'}
_LEVELS = '▁▂▃▄▅▆▇█'
_PLAIN = str.maketrans('▁▂▃▄▅▆▇█░│→·…', '__.-=+*#.|>-.')  # for a terminal without Unicode
_CURVES = (  # of which the first that a run has is drawn
    (names.REWARD_MEAN, 'reward'),
    ('loss/nll', 'loss (nll)'),
    ('loss/value', 'loss'),
)
_LEFT_OVER = 10  # updates whose mean time gives the time left


def render_frame(run: LiveRun, width: int, height: int, plain: bool = False) -> list[Text]:
    """Returns at most `height` lines of at most `width` columns.

    Args:
      plain: whether the terminal lacks Unicode.
    """
    from rich.text import Text

    width, height = max(width, LEAST_WIDTH), max(height, LEAST_HEIGHT)
    lines = []
    for row in _arrange(run, width, height)[:height]:
        line = Text(no_wrap=True)
        for text, style in row:
            line.append(_make_plain(text) if plain else text, style)
        line.rstrip()
        line.truncate(width, overflow='crop' if plain else 'ellipsis')
        lines.append(line)
    return lines


def _make_plain(text: str) -> str:
    return text.translate(_PLAIN).encode('ascii', 'backslashreplace').decode()


def _arrange(run: LiveRun, width: int, height: int) -> list[Row]:
    if not run.exists:
        return [[(f'there is no {run.workdir} yet: a run makes it when it starts', 'yellow')]]
    gap: list[Row] = [[]] if height >= _TALL else []
    above: list[list[Row]] = [_head(run)]
    below = [_slots(run, width), _groups(run), _ages(run, width), _rates(run), _curve(run, width)]
    fixed = sum(len(section) + len(gap) for section in (*above, *below) if section)
    most = max(3, height - fixed - 2 * len(gap) - _LEAST_ANSWERS)
    sections = [*above, _lanes(run, width, most), *below]
    rows: list[Row] = []
    for section in sections:
        rows += [*section, *gap] if section else []
    return rows + _answers(run, width, height - len(rows))


def _label(text: str) -> Part:
    return f'{text:<{_LABEL}}', 'bold'


def _head(run: LiveRun) -> list[Row]:
    state = run.state + (f' ({run.holder})' if run.holder else f': {run.reason}' if run.reason else '')
    told = [('  ' + run.loop.doing, 'yellow')] if run.loop.doing and run.is_running else []
    silent = f'  no event for {format_duration(run.silent_s)}' if run.is_running and run.silent_s >= 30 else ''
    first: Row = [
        (str(run.workdir), 'bold'), ('  ', ''), (state, _TONES.get(run.state, 'bold red')), *told, (silent, 'yellow'),
    ]  # fmt: skip
    step, planned = _step(run), run.fields.get('run.steps', '?')
    clock = '' if run.is_real else ' on the virtual clock'
    left = f'  left {format_duration(_find_left(run))}{clock}' if run.is_running else ''
    second = f'update {step} of {planned}  version {run.loop.version}  ran {format_duration(run.now)}{clock}{left}'
    if not run.is_running:
        second += '  (it does not change any more)' if run.state == FINISHED else '  (no process uses it)'
    unread = [[(f'{run.loop.unread} lines could not be read: areal-check-log names them', 'red')]]
    return [first, [(second, '')], *(unread if run.loop.unread else [])]


def _step(run: LiveRun) -> int:
    return int(number(run.rows[-1], names.STEP) or 0) if run.rows else 0


def _find_left(run: LiveRun) -> float | None:
    """Clock seconds until the last update at the mean pace of the last ones; None if that is unknown."""
    planned = run.fields.get('run.steps', '')
    times = [seconds for row in run.rows[-_LEFT_OVER - 1 :] if (seconds := number(row, names.TIME)) is not None]
    if len(times) < 2 or not planned.isdigit():
        return None
    pace = (times[-1] - times[0]) / (len(times) - 1)
    return max(0.0, pace * (int(planned) - _step(run)) - (run.now - times[-1]))


def _lanes(run: LiveRun, width: int, most: int) -> list[Row]:
    """A line for each lane; engines share one if there are more than `most` lines."""
    low, high = run.window
    shares = {name: lane.share(low, high) for name, lane in run.loop.lanes.items() if name and not is_upkeep_lane(name)}
    if not shares:
        return []
    rank = lambda name: _LANES.index(lane_group(name)) if lane_group(name) in _LANES else len(_LANES)
    ordered = sorted(shares, key=rank)
    engines = [name for name in ordered if is_engine_lane(name)]
    joined = len(ordered) >= most and len(engines) > 1
    rows: list[Row] = []
    if joined:
        mean = sum(shares[name] for name in engines) / len(engines)
        spread = f'{len(engines)} engines, {format_percent(min(shares[e] for e in engines))} to '
        rows.append(_bar('engines', mean, width, spread + format_percent(max(shares[e] for e in engines))))
        ordered = [name for name in ordered if name not in engines]
    room = max(1, most - 1 - len(rows))
    rows += [_bar(name, shares[name], width, _describe_work(run, name)) for name in ordered[:room]]
    if len(ordered) > room:
        rows[-1] = [(f'{"":<{_LABEL}}{len(ordered) - room + 1} more lanes', 'dim')]
    span = high - low
    title = 'last minute' if span >= 59.5 else f'last {span:.0f} s'
    return [[_label('lanes'), (f'occupied in the {title} of the clock', 'dim')], *rows]


def _bar(name: str, share: float, width: int, detail: str) -> Row:
    style = 'cyan' if name.startswith('engine') else 'green' if name == LEARNER else 'blue'
    label = f'{cut_text(name, _LABEL - 1):<{_LABEL}}'
    return [(label, ''), *_fill(share, width, style), (f' {share:>4.0%}  ', ''), (detail, 'dim')]


def _fill(share: float, width: int, style: str) -> Row:
    """A bar of which a share is full."""
    length = min(_BAR, max(8, width - _LABEL - 40))
    full = round(share * length)
    return [('█' * full, style), ('░' * (length - full), 'dim')]


def _describe_work(run: LiveRun, name: str) -> str:
    """'train update 13, 2.1 s so far'."""
    work = list(run.loop.lanes[name].open.values())
    if not work:
        return 'idle' if run.is_running else ''
    first = min(work, key=lambda event: event['time'])
    of = f' update {first["update"]}' if 'update' in first else ''
    several = f' and {len(work) - 1} more' if len(work) > 1 else ''
    if not run.is_running:
        return f'{first["work"]}{of}{several} when the log ended'
    return f'{first["work"]}{of}{several}, {format_number(round(run.now - first["time"], 1))} s so far'


def _slots(run: LiveRun, width: int) -> list[Row]:
    """The decoding slots at the last dispatch of each engine."""
    slots = sorted(run.loop.slots.items())
    if not slots:
        return []
    used, whole = sum(one.used for _, one in slots), sum(one.slots for _, one in slots)
    versions = sorted({one.version for _, one in slots})
    ago = run.now - max(one.time for _, one in slots)
    old = f', {format_duration(ago)} ago' if ago >= 2 else ''
    each = ' '.join(f'{one.used}/{one.slots}' for _, one in slots) if len(slots) > 1 else ''
    of = f'version {versions[0]}' if len(versions) == 1 else f'versions {versions[0]} to {versions[-1]}'
    return [[
        _label('slots'), *_fill(used / whole if whole else 0.0, width, 'magenta'), (f' {used} of {whole}', ''),
        (f'  at the last dispatch{old}, {of}  {each}', 'dim'),
    ]]  # fmt: skip


def _groups(run: LiveRun) -> list[Row]:
    loop, fields = run.loop, run.fields
    if loop.first is None:
        return []
    rewards = [f'{sum(some) / len(some):.2f}' for some in loop.buffered.values() if some]
    draws = f': draws {_list_draws(list(loop.buffered))}' if loop.buffered else ''
    of_rewards = f', mean rewards {" ".join(rewards[:6])}{" …" if len(rewards) > 6 else ""}' if rewards else ''
    most = int(fields.get('rollout.max_running_groups', '0') or 0)
    bound = f' of at most {most}' if most else ''
    trained = f', in training {len(loop.batch[1])} (update {loop.batch[0]})' if loop.batch else ''
    return [
        [_label('groups'), (f'running {len(loop.running)}{bound}{trained}, trained updates {loop.version}', '')],
        [_label('buffer'), (f'{len(loop.buffered)} of {fields.get("buffer.capacity", "?")}{draws}{of_rewards}', '')],
    ]


def _list_draws(draws: Sequence[int]) -> str:
    return ' '.join(map(str, draws[:6])) + (' …' if len(draws) > 6 else '')


def _ages(run: LiveRun, width: int) -> list[Row]:
    """The trained tokens of the last update by age, next to eta."""
    row = next((row for row in reversed(run.rows) if counts(row, names.TOKEN_AGE_HISTOGRAM)), None)
    if row is None:
        return []
    ages = counts(row, names.TOKEN_AGE_HISTOGRAM)
    tokens = sum(ages) or 1
    eta = float(run.fields.get('staleness.eta', 'nan'))  # of no age is it true that it is more than nan
    bound = '?' if math.isnan(eta) else 'unbounded' if math.isinf(eta) else format_number(eta)
    parts: Row = [_label('ages')]
    for age, count in enumerate(ages[:8]):
        tone = 'red' if age > eta else 'yellow'
        parts += [
            (f'{age} ', ''),
            ('█' * max(count > 0, round(8 * count / tokens)), tone),
            (f' {count / tokens:.0%}  ', ''),
        ]
    more = '… ' if len(ages) > 8 else ''
    mean, most = number(row, names.TOKEN_AGE_MEAN), number(row, names.TOKEN_AGE_MAX)
    told = f'{more}mean {format_number(mean)}, max {format_number(most)}, eta {bound}'
    return [[*parts, (told, 'dim')]]


def _rates(run: LiveRun) -> list[Row]:
    low, high = run.window
    if run.loop.first is None and not run.rows:
        return []
    generated = run.loop.generated(low) / (high - low) if high > low else None
    row: Line = run.rows[-1] if run.rows else {}
    rate = lambda name: format_number(number(row, name)) if name in row else '-'
    return [
        [
            _label('tokens/s'),
            (f'generated {format_number(generated and round(generated))}', 'cyan'),
            (f' now, {rate(names.GENERATE_RATE)} in the last update; ', 'dim'),
            (f'trained {rate(names.TRAIN_RATE)}', 'green'),
            (' in it', 'dim'),
        ]
    ]


def _curve(run: LiveRun, width: int) -> list[Row]:
    """The curve of the reward over the updates, or of a loss."""
    for name, label in _CURVES:
        values = [value for row in run.rows if name in row and (value := number(row, name)) is not None]
        if values:
            told = f' {show_number(values[0])} → {show_number(values[-1])}, {len(values)} updates'
            drawn = draw_sparkline(values, max(8, width - _LABEL - len(told)))
            return [[_label(label), (drawn, 'green'), (told, '')]]
    return []


def draw_sparkline(values: Sequence[float], columns: int) -> str:
    """Draws the values as blocks of eight heights, from the least to the largest; several a column in their mean."""
    columns = min(columns, len(values))
    edges = [round(index * len(values) / columns) for index in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return ''.join(_LEVELS[min(7, int(8 * (mean - low) / span))] for mean in means)


def _answers(run: LiveRun, width: int, room: int) -> list[Row]:
    """The newest answers, as many as fit."""
    if room < 2:
        return []
    if not run.answers:
        off = run.fields.get('telemetry.rollouts') == '0'
        why = "the run keeps none (telemetry.rollouts='0')" if off else 'none yet'
        return [[_label('answers'), (why, 'dim')]]
    title: Row = [_label('answers'), ('the newest: update, draw.sample, reward, versions, text', 'dim')]
    shown = list(run.answers)[::-1][: room - 1]
    return [title, *(_answer(one, width) for one in shown)]


def _answer(one: ShortAnswer, width: int) -> Row:
    span = '-' if not one.versions else 'v' + '-'.join(map(str, sorted(set(one.versions))))
    tone = 'dim' if one.reward is None else 'green' if one.reward > 0 else 'red'
    place = f'{one.update:>5} {f"{one.draw}.{one.name}":>9} '
    start = f'{place}{show_number(one.reward):>7} {span:>9}  '
    text = cut_text(escape(one.text), max(8, width - len(start)))
    return [(place, ''), (f'{show_number(one.reward):>7} ', tone), (f'{span:>9}  ', 'dim'), (text, '')]
