"""Some of the kept answers in report.html: the best and the worst of the first, a middle and the last update."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence

from areal_jax.files import JsonObject
from areal_jax.report.pages.report_texts import Table, Text
from areal_jax.report.pages.web_page import Absent, Block
from areal_jax.report.run_record import read_fields
from areal_jax.telemetry.rollouts import views
from areal_jax.telemetry.rollouts.views import GivenAnswer, read_rollouts

_HEAD = ('Update, draw, answer', 'End of the prompt', 'Answer', 'Reward', 'Verdict', 'Advantage', 'Age', 'Tokens')
_PROMPT, _ANSWER = 160, 400  # characters of each that are shown
_TO_TRACKER = Absent(
    'Answers are left out of a page that goes to a tracker, unless telemetry.tracker_answers is set: '
    '`areal-rollouts RUN` shows them.'
)
_NONE = Absent("No answer is kept: telemetry.rollouts is '0', or no update is finished.")


def tell_answers(workdir: pathlib.Path) -> Iterator[Block]:
    """What the section shows; no text of an answer on a page that is sent away unasked."""
    fields = read_fields(workdir)
    if fields.get('telemetry.tracker', 'none') != 'none' and fields.get('telemetry.tracker_answers') != 'true':
        yield _TO_TRACKER
    elif records := read_rollouts(workdir):
        yield Text(
            'The best and the worst of the kept answers of three updates. `areal-rollouts RUN` shows all of them.'
        )
        yield Table(_HEAD, [_make_row(one) for one in choose_samples(records)])
    else:
        yield _NONE


def choose_samples(records: Sequence[JsonObject]) -> list[GivenAnswer]:
    """Best and worst answer of the first, the middle and the last update, each answer once."""
    updates = sorted({record['update'] for record in records})
    chosen = dict.fromkeys((updates[0], updates[len(updates) // 2], updates[-1]))
    found = []
    for update in chosen:
        answers = views.sort_answers(views.select_groups(records, update, None), 'reward')
        found += [answers[0], *answers[1:][-1:]]
    return found


def _make_row(one: GivenAnswer) -> tuple[str, ...]:
    group, answer = one
    prompt = group['prompt']['text']
    return (
        f'{group["update"]}, {group["draw"]}, {views.name_of(answer)}',
        ('...' if len(prompt) > _PROMPT else '') + _on_one_line(prompt[-_PROMPT:]),
        views.cut_text(_on_one_line(answer['text'][: _ANSWER + 1]), _ANSWER),
        views.show_number(answer['reward']),
        views.verdict_of(answer),
        views.show_number(one.advantage),
        '-' if one.age is None else str(one.age),
        str(one.length),
    )


def _on_one_line(text: str) -> str:
    return views.escape(text.replace('\n', ' ⏎ '))
