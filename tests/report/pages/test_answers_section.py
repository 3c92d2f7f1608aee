"""The answers of report.html: which ones, and none where the page leaves the machine."""

from __future__ import annotations

import json
import pathlib

import pytest

from areal_jax.report.pages.blocks import Absent, Table, Text
from areal_jax.report.pages.html_page import choose_samples, tell_answers
from areal_jax.report.pages.web_page import render_web_page
from tests.telemetry.test_rollout_views import answer, group
from tests.telemetry.test_rollout_writer import write


def test_best_and_worst_of_three_updates():
    records = [
        group(u, u, answer(0, u / 10, 'a'), answer(1, 1 - u / 10, 'b'), answer(2, 0.5, 'c')) for u in (1, 2, 3, 4)
    ]
    chosen = [(one.group['update'], one.answer['reward']) for one in choose_samples(records)]
    assert chosen == [(1, 0.9), (1, 0.1), (3, 0.7), (3, 0.3), (4, 0.6), (4, 0.4)]
    assert len(choose_samples([group(7, 7, answer(0, 1.0, 'a'))])) == 1


def test_a_row_says_what_an_answer_is_worth(tmp_path: pathlib.Path):
    write(tmp_path, range(1, 3), tokens=300)
    text, table = tell_answers(tmp_path)
    assert isinstance(text, Text)
    assert isinstance(table, Table)
    assert len(table.rows) == 4
    assert dict(zip(table.head, table.rows[0], strict=True)) == {
        'Update, draw, answer': '1, 2, 1', 'End of the prompt': '1 2', 'Answer': ('3 ' * 300)[:397] + '...',
        'Reward': '1.000', 'Verdict': 'ok, stop', 'Advantage': '-', 'Age': '0', 'Tokens': '300',
    }  # fmt: skip


@pytest.mark.parametrize(
    ('fields', 'shown'),
    [
        ({'tracker': 'none'}, True),
        ({'tracker': 'wandb'}, False),
        ({'tracker': 'wandb', 'tracker_answers': False}, False),
        ({'tracker': 'wandb', 'tracker_answers': True}, True),
    ],
)
def test_an_answer_is_on_a_page_that_goes_to_a_tracker_only_where_the_config_says_so(
    tmp_path: pathlib.Path, fields: dict[str, object], shown: bool
):
    write(tmp_path, range(1, 3))
    (tmp_path / 'config.json').write_text(json.dumps({'telemetry': fields}))
    blocks = list(tell_answers(tmp_path))
    assert any(isinstance(block, Table) for block in blocks) == shown
    if not shown:
        (only,) = blocks
        assert isinstance(only, Absent)
        assert 'areal-rollouts RUN' in only.text


def test_a_run_that_keeps_none_says_so(tmp_path: pathlib.Path):
    (block,) = tell_answers(tmp_path)
    assert isinstance(block, Absent)
    assert 'No answer is kept' in block.text


def test_the_page_of_tokens_is_linked_where_it_was_written(tmp_path: pathlib.Path):
    write(tmp_path, range(1, 3))
    text, _ = tell_answers(tmp_path)
    assert '`areal-rollouts RUN --page` writes' in text.text
    (tmp_path / 'rollouts.html').write_text('')
    text, _ = tell_answers(tmp_path)
    page = render_web_page('tiny', [text, Text('[../x](../x) [a.html](b.html)')], [])
    assert '<a href="rollouts.html">rollouts.html</a>' in page
    assert page.count('<a href') == 1
