"""Answers in a terminal: a table, a group with its texts, two answers side by side, an answer by version.

Texts come from a model: unprintable characters are escaped, so that no answer moves the cursor or changes a title.
"""

from __future__ import annotations

import itertools
import pathlib
import statistics
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from areal_jax import files
from areal_jax.errors import UserError, suggest
from areal_jax.files import JsonObject
from areal_jax.telemetry.metrics import read_json_lines, require_fields
from areal_jax.telemetry.rollout_writer import DIRECTORY, list_files, read_records
from areal_jax.types import NOT_GENERATED

EVALUATED = 'answers.jsonl'  # evaluation/results.py


def read_rollouts(workdir: pathlib.Path) -> list[files.JsonObject]:
    """Reads the groups in the order of the files; groups of an evaluation have update 0. [] if none are kept.

    Raises FileError for a file that was edited or damaged.
    """
    records: list[files.JsonObject] = []
    for path in list_files(workdir / DIRECTORY):
        try:
            records += read_records(path)
        except FileNotFoundError:  # the run has just removed it
            continue
    return records or _read_evaluated(workdir / EVALUATED)


def _read_evaluated(path: pathlib.Path) -> list[files.JsonObject]:
    records: list[files.JsonObject] = []
    for number, line in enumerate(read_json_lines(path), start=1):
        require_fields(path, number, line, {'draw': int, 'prompt': str, 'answers': list})
        problem: files.JsonObject = line
        records.append(
            {
                'update': 0,
                'draw': problem['draw'],
                'task': '',
                **({'source': problem['source']} if 'source' in problem else {}),
                'trained': False,
                'prompt': {'text': problem['prompt'], 'tokens': problem.get('prompt_tokens', [])},
                'problem': problem.get('problem', {}),
                'answers': [_convert(path, number, answer) for answer in problem['answers']],
            }
        )
    return records


def _convert(path: pathlib.Path, number: int, answer: files.JsonObject) -> files.JsonObject:
    fields: dict[str, type | tuple[type, ...]] = {
        'text': str,
        'reward': (int, float),
        'label': str,
        'finish_reason': str,
        'tokens': list,
    }
    require_fields(path, number, answer, fields)
    return {
        **{name: answer[name] for name in ('reward', 'label', 'text', 'tokens')},
        'sample': answer.get('sample', 0),
        'finish': answer['finish_reason'],
        'final': answer.get('final', ''),
    }


_HEAD = (
    f'{"update":>6} {"draw":>6} {"answer":>6} {"reward":>7} {"adv.":>7} {"age":>4} {"tokens":>6}  {"verdict":<14} text'
)
_SOURCE = 'source'  # head of the column that a mixture has in addition
_LEAST_TEXT = 15  # characters of a text, however narrow the terminal


class GivenAnswer(NamedTuple):
    """An answer and its group, as in the files."""

    group: JsonObject
    answer: JsonObject

    @property
    def advantage(self) -> float | None:
        """The mean over its tokens; None if it was not trained."""
        value = self.answer.get('advantage')
        known = [x for x in value if x is not None] if isinstance(value, list) else [] if value is None else [value]
        return statistics.fmean(known) if known else None

    @property
    def age(self) -> int | None:
        """The largest of its tokens, in versions."""
        return max((age for age in self.answer.get('ages', ()) if age is not None), default=None)

    @property
    def length(self) -> int:
        """Number of tokens after the prompt; number of characters if the tokens were cut."""
        return len(self.answer['tokens'] if 'tokens' in self.answer else self.answer['text'])


_LOWEST = float('-inf')
_KEYS: Mapping[str, Callable[[GivenAnswer], float]] = {  # the largest first
    'update': lambda one: one.group['update'],
    'reward': lambda one: _LOWEST if one.answer['reward'] is None else one.answer['reward'],
    'advantage': lambda one: _LOWEST if one.advantage is None else one.advantage,
    'age': lambda one: -1 if one.age is None else one.age,
    'length': lambda one: one.length,
}
ORDERS = tuple(order for name in _KEYS for order in (name, f'-{name}'))


def select_groups(
    records: Sequence[JsonObject], update: int | None, draw: int | None, source: str | None = None
) -> list[JsonObject]:
    """The groups of `update`, `draw` and `source`, None = of all; raises UserError if no such group is kept."""
    updates = [record['update'] for record in records]
    if update is not None and update not in updates:
        raise UserError(
            f'--step={update}: no answers of it are kept; of updates {min(updates)} to {max(updates)} some are'
        )
    found = [record for record in records if update is None or record['update'] == update]
    if source is not None:
        sources = sorted({record['source'] for record in found if 'source' in record})
        found = [record for record in found if record.get('source') == source]
        if not found:
            kept = f'of {", ".join(sources)} some are' if sources else 'the run has no sources'
            raise UserError(f'--source={source}: no answers of it are kept{suggest(source, sources)}; {kept}')
    if draw is not None:
        draws = [record['draw'] for record in found]
        found = [record for record in found if record['draw'] == draw]
        if not found:
            raise UserError(f'--draw={draw} is not kept; of draws {min(draws)} to {max(draws)} {len(draws)} are')
    return found


def sort_answers(groups: Sequence[JsonObject], order: str) -> list[GivenAnswer]:
    """Sorts all answers of the groups, the largest first; '-reward' = the lowest first. Ties keep the files' order."""
    answers = [GivenAnswer(group, answer) for group in groups for answer in group['answers']]
    return sorted(answers, key=_KEYS[order.removeprefix('-')], reverse=not order.startswith('-'))


def render_table(answers: Sequence[GivenAnswer], width: int) -> str:
    """Renders one line per answer."""
    longest = max((len(one.group.get('source', '')) for one in answers), default=0)
    column = max(longest, len(_SOURCE)) if longest else 0  # 0: the run has one task
    head = _HEAD.replace(' answer', f' {_SOURCE:<{column}} answer', 1) if column else _HEAD
    return '\n'.join([head, *(_render_line(one, width, column) for one in answers)])


def _render_line(one: GivenAnswer, width: int, column: int) -> str:
    group, answer = one
    source = f'{group.get("source", ""):<{column}} ' if column else ''
    line = (
        f'{group["update"]:>6} {group["draw"]:>6} {source}{name_of(answer):>6} {show_number(answer["reward"]):>7} '
        f'{show_number(one.advantage):>7} {"-" if one.age is None else one.age:>4} {one.length:>6}  '
        f'{verdict_of(answer):<14} '
    )
    return (line + cut_text(escape(answer['text']), max(_LEAST_TEXT, width - len(line)))).rstrip()


def render_group(group: JsonObject, answers: Sequence[JsonObject], width: int) -> str:
    """Renders the prompt, the problem as the verifier got it, and the answers in full."""
    fate = '' if group['trained'] else ', not trained' if group['update'] else ''
    update = f'update {group["update"]}, ' if group['update'] else ''
    lines = [f'{update}draw {group["draw"]} of {_name_task(group)}{fate}', '', 'prompt']
    lines += _indent(group['prompt']['text'], width)
    if group.get('problem'):
        lines += ['', 'problem']
        lines += [line for k, v in group['problem'].items() for line in _indent(f'{k}: {v}', width)]
    for answer in answers:
        lines += ['', _title(GivenAnswer(group, answer))]
        if 'prompt' in answer:
            lines += ['  (a prompt of its own)', *_indent(answer['prompt']['text'], width), '']
        lines += _indent(answer['text'], width)
    if 'cut' in group:
        lines += ['', f'too long to keep whole: {group["cut"]} were cut']
    return '\n'.join(lines)


def _name_task(group: JsonObject) -> str:
    """'token_reversal'; 'short (token_reversal)' for a source of a mixture."""
    task = str(group.get('task') or 'the task')
    return f'{group["source"]} ({task})' if 'source' in group else task


def render_versions(group: JsonObject, answer: JsonObject, width: int) -> str:
    """Renders the answer in spans of policy versions, with mean log-probs of the behavior and the trained policy."""
    lines = [_title(GivenAnswer(group, answer))]
    if 'versions' not in answer or 'characters' not in answer:
        return '\n'.join([*lines, *_indent(answer['text'], width)])
    start = place = 0
    for (count, version), age in zip(answer['versions'], answer['ages'], strict=True):
        end = start + sum(answer['characters'][place : place + count])
        says = 'not generated' if version == NOT_GENERATED else f'version {version}, age {age}'
        means = [
            f'{name.removesuffix("_logprobs")} {show_number(_mean(answer[name][place : place + count]))}'
            for name in ('behavior_logprobs', 'policy_logprobs')
            if name in answer and version != NOT_GENERATED
        ]
        logprobs = f'; mean log-prob: {", ".join(means)}' if means else ''
        lines += ['', f'  {says}: {_count(count, "token")}{logprobs}', *_indent(answer['text'][start:end], width)]
        start, place = end, place + count
    return '\n'.join(lines)


def choose_contrast(groups: Sequence[JsonObject]) -> tuple[JsonObject, JsonObject, JsonObject]:
    """Returns (group, best, worst answer) of the group whose rewards differ most; of ties the newest.

    Raises UserError if no group has two scored answers.
    """
    pairs = [
        (group, max(scored, key=_reward), min(reversed(scored), key=_reward))
        for group in groups
        if len(scored := [answer for answer in group['answers'] if answer['reward'] is not None]) > 1
    ]
    if not pairs:
        raise UserError('--diff needs a group of two answers, and none is kept')
    return max(reversed(pairs), key=lambda pair: _reward(pair[1]) - _reward(pair[2]))


def render_contrast(group: JsonObject, first: JsonObject, second: JsonObject, width: int) -> str:
    """Renders two answers side by side; a bar separates lines that differ."""
    column = max(_LEAST_TEXT, (width - 3) // 2)
    titles = [[_title(GivenAnswer(group, answer), short=True)] for answer in (first, second)]
    left, right = (
        [*(wrapped for line in title for wrapped in textwrap.wrap(line, column)), '', *_wrap(answer['text'], column)]
        for title, answer in zip(titles, (first, second), strict=True)
    )
    pairs = itertools.zip_longest(left, right, fillvalue='')
    lines = [f'{set_cell_size(a, column)} {" " if a == b else "|"} {b}'.rstrip() for a, b in pairs]
    return '\n'.join([render_group(group, [], width), '', *lines])


def _reward(answer: JsonObject) -> float:
    return float(answer['reward'])


def _title(one: GivenAnswer, short: bool = False) -> str:
    answer = one.answer
    parts = [
        f'answer {name_of(answer)}',
        f'reward {show_number(answer["reward"])}',
        f'advantage {show_number(one.advantage)}' if one.advantage is not None else '',
        verdict_of(answer),
        _count(one.length, 'token' if 'tokens' in answer else 'character'),
    ]
    clipped = sum(mark in '+-' for mark in answer.get('clip', ''))
    masked = answer.get('loss_mask', '').count('0')
    if not short:
        parts += [
            f'age {one.age}' if one.age is not None else '',
            f'{clipped} clipped' if clipped else '',
            f'{masked} masked' if masked else '',
            f'mean policy log-prob {show_number(_mean(known))}' if (known := answer.get('policy_logprobs')) else '',
            answer.get('engine', ''),
        ]
    return ', '.join(part for part in parts if part)


def _count(number: int, noun: str) -> str:
    return f'{number} {noun}{"" if number == 1 else "s"}'


def name_of(answer: JsonObject) -> str:
    """'3'; '3.1' for another row of its episode; 'greedy' in an evaluation."""
    return f'{answer["sample"]}.{answer["row"]}' if answer.get('row') else str(answer['sample'])


def verdict_of(answer: JsonObject) -> str:
    """'ok, stop': the label of its verdict and its finish reason."""
    return f'{answer["label"]}, {answer["finish"]}'


def show_number(value: float | None) -> str:
    """Formats with three decimals; '-' for None."""
    return '-' if value is None else f'{value:.3f}'


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def escape(text: str, keep: str = '') -> str:
    """Escapes the characters that a terminal would obey, except those in `keep`; a line break becomes \\n."""
    return ''.join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def cut_text(text: str, most: int) -> str:
    """Cuts the text to at most `most` columns, with '...' in place of the rest."""
    if cell_len(text) <= most:
        return text
    widths = itertools.accumulate(map(cell_len, text))
    return text[: sum(width <= most - 3 for width in widths)] + '...'


def _wrap(text: str, column: int) -> Iterator[str]:
    """Yields the text in lines of at most `column` columns; drops line breaks and one space at each wrap."""
    for line in escape(text.replace('\t', '    '), keep='\n').split('\n'):
        rest = line
        while cell_len(rest) > column:
            fitting = sum(width <= column for width in itertools.accumulate(map(cell_len, rest)))
            space = rest.rfind(' ', 1, fitting + 1)
            end = space if space > column // 2 else fitting
            yield rest[:end]
            rest = rest[end:].removeprefix(' ')
        yield rest


def _indent(text: str, width: int) -> list[str]:
    return [f'  {line}'.rstrip() for line in _wrap(text, max(_LEAST_TEXT, width - 2))]
