"""The file of scores: one writer, torn lines, files of others."""

import json
import re

import pytest

from areal_jax.app.score.given_answers import GivenAnswer
from areal_jax.app.score.score_file import ScoreFile, make_score
from areal_jax.errors import UserError
from areal_jax.files import FileError
from areal_jax.types import Verdict

IDENTITY = {'task.name': 'own', 'sha256 of the problems': 'aa'}


def answer(line, **fields):
    return GivenAnswer(**{
        'line': line, 'digest': f'd{line}', 'sample': None, 'place': 0, 'names': {'question': 'p'}, 'text': '',
        'finish_reason': 'stop', **fields,
    })  # fmt: skip


@pytest.fixture
def out(tmp_path):
    """A file with two scores."""
    file = ScoreFile(tmp_path / 's.jsonl', IDENTITY)
    for line in (1, 2):
        file.append(make_score(answer(line), Verdict(float(line))))
    file.close()
    return tmp_path / 's.jsonl'


def test_a_line_says_what_was_scored_and_what_came_out():
    failed = Verdict(0.0, attempts=2, label='crash', reason='exit code 3')
    assert make_score(answer(4, sample='greedy'), failed) == {
        'line': 4, 'sample': 'greedy', 'question': 'p', 'reward': None, 'label': 'crash', 'attempts': 2,
        'reason': 'exit code 3', 'digest': 'd4',
    }  # fmt: skip
    assert make_score(answer(4), Verdict(0.25)) == {
        'line': 4, 'question': 'p', 'reward': 0.25, 'label': 'ok', 'attempts': 1, 'digest': 'd4',
    }  # fmt: skip


def test_a_torn_line_is_cut_and_writing_goes_on(out):
    with out.open('a') as file:
        file.write('{"line": 3, "rew')
    file = ScoreFile(out, IDENTITY)
    assert [score['line'] for score in file.read()] == [1, 2]
    file.append(make_score(answer(3), Verdict(3.0)))
    file.close()
    assert [json.loads(line)['reward'] for line in out.read_text().splitlines()] == [1.0, 2.0, 3.0]


def test_a_file_without_a_score_is_removed(tmp_path):
    file = ScoreFile(tmp_path / 's.jsonl', IDENTITY)
    file.close()
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_two_cannot_write_at_once(out):
    first = ScoreFile(out, IDENTITY)
    with pytest.raises(UserError, match=r'--out=\S+ is being written by another areal-score: wait for it to end'):
        ScoreFile(out, IDENTITY)
    first.close()
    ScoreFile(out, IDENTITY).close()


def test_scores_of_another_task_are_refused_by_name(out):
    before = out.read_bytes()
    said = "has scores of another task: sha256 of the problems: 'aa' -> 'bb'; use the same, or another --out"
    with pytest.raises(UserError, match=re.escape(said)):
        ScoreFile(out, IDENTITY | {'sha256 of the problems': 'bb'})
    out.with_name('s.jsonl.task.json').unlink()
    with pytest.raises(UserError, match=r'holds something else than scores \(there is no s.jsonl.task.json beside it'):
        ScoreFile(out, IDENTITY)
    assert out.read_bytes() == before


def test_a_line_that_is_no_score_is_refused(out):
    out.write_text('{"question": "p"}\n' + out.read_text())
    file = ScoreFile(out, IDENTITY)
    with pytest.raises(FileError, match=r's.jsonl: line 1 is no score; restore the file as areal-score wrote it'):
        list(file.read())
    file.close()
    assert out.read_text().count('\n') == 3


@pytest.mark.parametrize('now', [None, answer(2), answer(1, digest='other'), answer(1, sample=1)])
def test_a_score_of_another_answer_is_refused(out, tmp_path, now):
    file = ScoreFile(out, IDENTITY)
    first = next(iter(file.read()))
    file.require_answer(first, answer(1), tmp_path / 'a.jsonl')
    with pytest.raises(FileError, match=r'a.jsonl: line 1 is not what \S+s.jsonl has a score of: the answers have'):
        file.require_answer(first, now, tmp_path / 'a.jsonl')
    file.close()
