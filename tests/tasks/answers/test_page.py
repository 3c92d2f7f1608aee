"""The tables of docs/answers.md say what the code does."""

import pathlib
import re

import pytest

from areal_jax.config.declarations import choices
from areal_jax.tasks import jsonl
from areal_jax.tasks.answers import mathematics
from areal_jax.tasks.scoring.score_call import score_answer

PAGE = (pathlib.Path(__file__).parents[3] / 'docs' / 'answers.md').read_text()


NO_GOLDS = {'That leaves 9-4', 'She has 3 * 12 = 36 eggs.'}  # they hold other numbers too


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without backticks and with line ends."""
    section = PAGE.partition(f'### `{heading}`')[2].partition('\n#')[0]
    table = [line for line in section.splitlines() if line.startswith('| `')]
    return [[cell.strip('`').replace(r'\n', '\n') for cell in re.split(r' ?\| ?', line)[1:-1]] for line in table]


@pytest.mark.parametrize(('kind', 'n'), [('number', 28), ('integer', 6), ('exact', 6), ('normalised', 9)])
def test_what_a_text_is_read_as(kind, n):
    table = rows(kind)
    assert len(table) == n
    for text, form in table:
        label = score_answer(jsonl.KINDS[kind].score, {'answer': form}, text, 'stop').label
        assert label == ('unparsed' if form == 'unparsed' else 'ok'), text
        if label == 'ok':
            assert jsonl.KINDS[kind].final_answer(text) == form, text
            assert jsonl.KINDS[kind].score({'answer': form}, text, 'stop') == 1.0
            read = jsonl.KINDS[kind].read_gold(text)
            assert read == form or (read is None and text in NO_GOLDS)


def test_what_is_equal_as_mathematics():
    table = rows('math')
    assert len(table) == 16
    for gold, text, equal in table:
        score = score_answer(mathematics.score, {'answer': gold}, text, 'stop')
        found = 'unparsed' if score.label == 'unparsed' else {1.0: 'yes', 0.0: 'no'}[score]
        assert found == equal, (gold, text)


def test_every_kind_is_on_the_page():
    for kind in choices('task.answer'):
        assert f'| `{kind}` |' in PAGE
