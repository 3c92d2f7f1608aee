"""Problems by what names them, given answers and the file of scores, and the sentences for what is refused."""

from __future__ import annotations

import json
import re
import tracemalloc

import pytest

from areal_jax.app.score.answer_files import (
    GivenAnswer,
    ProblemIndex,
    ScoreFile,
    list_prompts,
    make_score,
    read_answers,
)
from areal_jax.errors import UserError
from areal_jax.files import FileError
from areal_jax.tasks.questions import question_task
from areal_jax.tasks.task import ListedTask
from areal_jax.text.tokenizer import CharacterTokenizer
from areal_jax.types import Verdict

TOKENIZER = CharacterTokenizer('abcdefgh0123456789=', has_eos=True)
PROBLEMS = [{'question': f'{n}=', 'task_id': f't/{n}', 'id': n, 'gold': n} for n in range(10)]


def score(problem, answer_text, finish_reason):
    return 1.0


def task_of(problems):
    messages = lambda problem: [{'role': 'user', 'content': problem.get('question', 'a')}]
    return ListedTask('own', score, {'train': problems[:3], 'held_out': problems[3:]}, messages, TOKENIZER)


def find(problems, record):
    index = ProblemIndex(task_of(problems), 0)
    place, names = index.find(record, 'a.jsonl: line 7')
    return index.prompts[place].problem, names


@pytest.mark.parametrize(
    ('record', 'names'),
    [
        ({'question': '4='}, {'question': '4='}),
        ({'prompt': '4='}, {'prompt': '4='}),
        ({'problem': '4='}, {'problem': '4='}),
        ({'task_id': 't/4'}, {'task_id': 't/4'}),
        ({'id': 4}, {'id': 4}),
        ({'id': '4'}, {'id': '4'}),
        ({'question': '4=', 'id': 4, 'gold': 9}, {'question': '4=', 'id': 4}),
        ({'problem': PROBLEMS[4], 'prompt': 'with a chat template'}, PROBLEMS[4] | {'gold': None}),
        ({'problem': PROBLEMS[4] | {'gold': 'mended since'}}, PROBLEMS[4] | {'gold': None}),
    ],
)
def test_a_line_names_a_problem(record, names):
    found = find(PROBLEMS, record)
    assert found == (PROBLEMS[4], {name: value for name, value in names.items() if value is not None})


def test_both_sides_of_the_task_are_found_and_nothing_is_tokenized():
    task = question_task(None, [{'question': f'{n}='} for n in range(50)], score)  # without a tokenizer
    index = ProblemIndex(task, 0)
    assert task.sizes()['held_out'] > 0 < task.sizes()['train']
    assert {index.prompts[index.find({'question': f'{n}='}, '')[0]].problem['question'] for n in range(50)} == {
        f'{n}=' for n in range(50)
    }


def test_an_id_counts_only_where_the_problems_have_one():
    assert find([{'question': 'a='}], {'question': 'a=', 'id': 'of the answer'}) == (
        {'question': 'a='}, {'question': 'a='},
    )  # fmt: skip


def test_problems_without_a_question_have_their_prompts_and_are_named_whole():
    problems = [{'letters': letters} for letters in ('ab', 'ba')]
    prompts = list_prompts(task_of(problems), 0)
    assert [len(prompt.tokens) for prompt in prompts] == [1, 1]
    assert find(problems, {'problem': {'letters': 'ba'}}) == (problems[1], {'problem': problems[1]})


def test_equal_questions_are_told_apart_by_the_whole_problem_or_an_id():
    problems = [{'question': 'a=', 'id': n} for n in range(2)]
    assert find(problems, {'problem': problems[1]})[0] == find(problems, {'question': 'a=', 'id': 1})[0] == problems[1]
    without_id = [{'question': 'a=', 'gold': n} for n in range(2)]
    assert find(without_id, {'problem': without_id[1]})[0] == without_id[1]


@pytest.mark.parametrize(
    ('record', 'said'),
    [
        (
            {'answer': '1'},
            'names no problem: give its question as the task has it, as a text, or its task_id, or its id',
        ),
        ({'question': 4}, 'names no problem: give its question as the task has it'),
        ({'question': '11='}, "names no problem of task 'own' by question='11=': write it exactly as the task has it"),
        ({'question': '4=', 'id': 5}, "names no problem of task 'own' by question='4=' and id=5: write"),
        ({'task_id': 't/44'}, "names no problem of task 'own' by task_id='t/44'"),
        ({'problem': {'gold': 3}}, "names no problem of task 'own' by problem={'gold': 3}"),
        (
            {'question': 'twice'},
            "names 2 problems of task 'own' by question='twice': add a field that tells them apart",
        ),
    ],
)
def test_a_line_that_names_none_or_several_is_refused(record, said):
    twice = [{'question': 'twice', 'gold': n} for n in range(2)]
    with pytest.raises(FileError, match=f'^a.jsonl: line 7 {re.escape(said)}'):
        find([*PROBLEMS, *twice], record)


def test_the_digest_sees_a_changed_problem_and_not_the_order():
    digest = lambda problems: ProblemIndex(task_of(problems), 0).digest()
    assert digest(PROBLEMS) == digest(PROBLEMS[::-1])
    assert digest(PROBLEMS) != digest([*PROBLEMS[:-1], PROBLEMS[-1] | {'gold': 11}])


# The lines that areal-score reads, and the sentences for those it refuses.


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


# The file of scores: one writer, torn lines, files of others.


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
