"""The lines that areal-score reads, and the sentences for those it refuses."""

import json
import re
import tracemalloc

import pytest

from areal_jax.app.score.given_answers import read_answers
from areal_jax.app.score.problem_index import ProblemIndex
from areal_jax.files import FileError
from areal_jax.tasks.task import question_task


def score(problem, answer_text, finish_reason):
    return 1.0


INDEX = ProblemIndex(question_task(None, [{'question': question} for question in 'pqr'], score), 0)


def read(tmp_path, content):
    path = tmp_path / 'a.jsonl'
    path.write_bytes(content if isinstance(content, bytes) else '\n'.join(map(json.dumps, content)).encode())
    return list(read_answers(path, INDEX))


def brief(answers):
    return [
        (answer.line, answer.sample, INDEX.prompts[answer.place].problem['question'], answer.text, answer.finish_reason)
        for answer in answers
    ]


def test_each_form_of_a_line(tmp_path):
    found = read(
        tmp_path,
        [
            {'question': 'p', 'answer': 'one'},
            {'question': 'p', 'text': '', 'finish_reason': 'length', 'sample': 'a'},
            {'prompt': 'q', 'answers': ['x', 'y'], 'finish_reason': 'length'},
            {'problem': {'question': 'r'}, 'draw': 5, 'answers': [
                {'sample': 'greedy', 'text': 'g', 'finish_reason': 'stop', 'tokens': [1], 'reward': 0.5},
                {'sample': 1, 'text': 's', 'finish_reason': 'length'},
            ]},
        ],
    )  # fmt: skip
    assert brief(found) == [
        (1, None, 'p', 'one', 'stop'),
        (2, 'a', 'p', '', 'length'),
        (3, 1, 'q', 'x', 'length'),
        (3, 2, 'q', 'y', 'length'),
        (4, 'greedy', 'r', 'g', 'stop'),
        (4, 1, 'r', 's', 'length'),
    ]
    assert [answer.names for answer in found[3:]] == [{'prompt': 'q'}, *[{'draw': 5, 'question': 'r'}] * 2]


def test_blank_lines_are_counted_and_equal_lines_are_two_answers(tmp_path):
    line = b'{"question": "p", "answer": "\\ud800"}'
    found = read(tmp_path, b'\xef\xbb\xbf' + line + b'\r\n\n  \n' + line)
    assert brief(found) == [(1, None, 'p', '\ud800', 'stop'), (4, None, 'p', '\ud800', 'stop')]
    assert found[0].digest == found[1].digest


@pytest.mark.parametrize(
    ('lines', 'said'),
    [
        (b'', r'--answers=\S+ has no line: give one JSON object a line, with question and answer'),
        (b'\n\n', r'--answers=\S+ has no line'),
        (b'{"question": "p", "answer": "a"}\n{"question": ', r'\S+: line 2 is no JSON: Expecting value; give one JSON'),
        (b'{"question": "p", "answer": "\xff"}', r'\S+: line 1 is no JSON: it is not UTF-8; give'),
        (b'["p", "a"]', r'\S+: line 1 holds a list, not an object; give'),
        (b'[' * 100_000, r'\S+: line 1 is no JSON that can be read \(RecursionError'),
        ([{'answer': 'a'}], r'\S+: line 1 names no problem: give its question as the task has it, as a text$'),
        ([{'question': 'z', 'answer': 'a'}], r"\S+: line 1 names no problem of task '\w+' by question='z': write it"),
        ([{'question': 'p'}], r'\S+: line 1 has no answer: add "answer", the text that is scored'),
        ([{'question': 'p', 'answer': 7}], r'\S+: line 1 has answer=7: give a text, in quotation marks'),
        ([{'question': 'p', 'answer': 'a', 'text': 'a'}], r'\S+: line 1 has both answer and text: remove one'),
        ([{'question': 'p', 'answer': 'a', 'answers': []}], r'\S+: line 1 has both answers and answer: remove one'),
        ([{'question': 'p', 'answers': []}], r'\S+: line 1 has answers=\[\]: give a list with one text or more'),
        ([{'question': 'p', 'answers': 'a'}], r"\S+: line 1 has answers='a': give a list"),
        ([{'question': 'p', 'answers': [3]}], r'\S+: line 1 has the answer 3: give a text, or an object with text'),
        (
            [{'question': 'p', 'answer': 'a', 'finish_reason': 'eos'}],
            r"\S+: line 1 has finish_reason='eos': give stop ",
        ),
        ([{'question': 'p', 'answer': 'a', 'finish_reason': []}], r'\S+: line 1 has finish_reason=\[\]: give stop or'),
        ([{'question': 'p', 'answer': 'a', 'sample': [1]}], r'\S+: line 1 has sample=\[1\]: give a number or a name'),
        (
            [{'question': 'p', 'answers': [{'text': 'a', 'sample': 1}, {'text': 'b', 'sample': 1}]}],
            r'\S+: line 1 has the sample 1 twice: remove one',
        ),
        (
            [{'question': question, 'answer': 'a', 'sample': 1} for question in 'pqp'],
            r'\S+: line 3 has the sample 1 of a problem that line 1 has: remove one',
        ),
    ],
)
def test_a_line_that_cannot_be_scored_is_refused_by_name(tmp_path, lines, said):
    with pytest.raises(FileError, match=f'^{said}') as caught:
        read(tmp_path, lines)
    assert '\n' not in str(caught.value)


def test_what_is_no_file_of_lines_is_refused(tmp_path):
    for path, reason in ((tmp_path / 'none', 'cannot be read (No such file'), (tmp_path, 'is no regular file')):
        with pytest.raises(FileError, match=re.escape(f'--answers={path} {reason}')):
            list(read_answers(path, INDEX))


def test_memory_does_not_grow_with_the_file(tmp_path):
    path = tmp_path / 'a.jsonl'
    line = json.dumps({'question': 'p', 'answer': 'x' * 100_000})
    path.write_text(f'{line}\n' * 200)  # 20 MB
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_answers(path, INDEX)) == 200
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
