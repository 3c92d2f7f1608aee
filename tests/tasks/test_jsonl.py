from __future__ import annotations

import importlib
import json
import re

import pytest

from areal_jax.config.declarations import choices
from areal_jax.installation import describe_install
from areal_jax.tasks import jsonl
from areal_jax.tasks.answers import mathematics
from areal_jax.tasks.answers.kinds import INTEGER
from areal_jax.tasks.scoring.score_call import score_answer
from areal_jax.tasks.task import TaskError
from areal_jax.text.tokenizer import CharacterTokenizer

ROWS = [
    {'question': 'Ann has 3 bags of 12 nuts. How many nuts?', 'answer': '3 bags of 12 are 3*12=36.\n#### 36'},
    {'question': 'A town of 800 people grows by 434. How many live there?', 'answer': '800+434=1234\n#### 1,234'},
    {'question': 'It was 5 degrees and fell by 9. How cold is it?', 'answer': '5-9=-4\n#### -4'},
    {'question': 'How many legs have 2 dogs?', 'answer': '8'},
    {'question': 'How many legs have 2 dogs?', 'answer': '9'},  # asked before: the first counts
]
ASCII = ''.join(map(chr, range(32, 127)))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / 'rows.jsonl'
    path.write_text('\n'.join(json.dumps(row) for row in ROWS) + '\n\n')
    return path


def test_answers_are_plain_digits(path):
    assert [problem['answer'] for problem in jsonl.read_problems(path, 'integer')] == ['36', '1234', '-4', '8']


def test_line_separator_inside_a_string_ends_no_line(path):
    path.write_text(json.dumps({'question': 'a\u2028b', 'answer': '1'}, ensure_ascii=False) + '\r\n', encoding='utf-8')
    assert jsonl.read_problems(path, 'integer') == [{'question': 'a\u2028b', 'answer': '1'}]


def test_task_splits_and_prompts(path):
    tokenizer = CharacterTokenizer(ASCII)
    # hash fractions of the distinct questions: .73, .44, .84, .46
    task = jsonl.build(tokenizer, str(path), 'integer', system_prompt='Think. ', held_out_fraction=0.5)
    questions = {side: [p['question'][:5] for p in task.problems[side]] for side in ('train', 'held_out')}
    assert questions == {'train': ['Ann h', 'It wa'], 'held_out': ['A tow', 'How m']}
    prompt = task.held_out(1, seed=0)[0]
    assert tokenizer.decode(prompt.tokens) == 'Think. ' + prompt.problem['question']


@pytest.mark.parametrize(('answer', 'read'), [(36, '36'), (-4.0, '-4'), (1e20, '1' + 20 * '0'), (' 7 ', '7')])
def test_answers_may_be_numbers(path, answer, read):
    path.write_text(json.dumps({'question': 'q', 'answer': answer}))
    assert jsonl.read_problems(path, 'integer') == [{'question': 'q', 'answer': read}]


def test_without_a_path_the_field_is_named():
    with pytest.raises(TaskError, match=r"task\.name='jsonl' needs task\.path"):
        jsonl.build(CharacterTokenizer(ASCII), '', 'integer', '', 0.25)


@pytest.mark.parametrize(
    ('text', 'finish_reason', 'reward'),
    [
        ('1234', 'stop', 1.0),
        ('800 + 434 = 1,234\n#### 1,234', 'stop', 1.0),
        ('$1234.00', 'stop', 1.0),
        ('1234 people in 2 towns', 'stop', 0.0),
        ('1,234', 'length', 0.0),
        ('', 'stop', 0.0),
        ('9' * 5000, 'stop', 0.0),
    ],
)
def test_reward_by_hand(text, finish_reason, reward):
    assert INTEGER.score({'answer': '1234'}, text, finish_reason) == reward


@pytest.mark.parametrize(
    ('text', 'finish_reason', 'label'),
    [
        ('1234', 'stop', 'ok'),
        ('7', 'stop', 'ok'),
        ('6.5', 'stop', 'ok'),
        ('many', 'stop', 'unparsed'),
        ('many', 'length', 'ok'),
    ],
)
def test_an_answer_without_a_number_is_unparsed_unless_it_was_cut(text, finish_reason, label):
    assert score_answer(INTEGER.score, {'answer': '1234'}, text, finish_reason).label == label


@pytest.mark.parametrize(
    ('kind', 'row', 'read'),
    [
        ('number', {'problem': 'q', 'solution': r'so $\boxed{\frac{3}{4}}$.'}, '3/4'),
        ('number', {'question': 'q', 'answer': 2.5}, '5/2'),
        ('number', {'question': 'q', 'answer': '5 - 2.5\n#### $2.50'}, '5/2'),
        ('integer', {'problem': 'q', 'solution': r'of 9 parts \boxed{7} are left, not 2'}, '7'),
        ('exact', {'question': 'q', 'answer': ' Paris '}, 'Paris'),
        ('exact', {'question': 'q', 'answer': 'It is the capital.\n#### Paris'}, 'Paris'),
        ('normalised', {'question': 'q', 'answer': 'The “Louvre”!'}, 'louvre'),
        ('math', {'problem': 'q', 'solution': r'hence \boxed{x^2 + 1}.'}, 'x^2 + 1'),
        ('math', {'problem': 'q', 'answer': r'\frac{3}{4}', 'solution': r'so \boxed{\frac34}'}, r'\frac{3}{4}'),
    ],
)
def test_gold_of_each_kind(path, kind, row, read):
    path.write_text(json.dumps(row))
    assert jsonl.read_problems(path, kind) == [{'question': 'q', 'answer': read}]


def test_question_and_answer_come_before_problem_and_solution(path):
    path.write_text(json.dumps({'problem': 'b', 'question': 'a', 'solution': r'\boxed{2}', 'answer': '1'}))
    assert jsonl.read_problems(path, 'integer') == [{'question': 'a', 'answer': '1'}]


@pytest.mark.parametrize(
    ('kind', 'answer', 'form'),
    [
        ('integer', 'so 3*4 = 12', '12'),
        ('number', r'so \boxed{\frac{6}{4}}', '3/2'),
        ('exact', 'We see:\nThe answer is Paris.', 'Paris'),
        ('normalised', 'We see:\nThe answer is **the  Louvre**.', 'louvre'),
        ('math', r'so \boxed{ \dfrac12 x}', r'\frac{1}{2}x'),
    ],
)
def test_final_answer_is_the_normal_form_of_the_kind(path, kind, answer, form):
    path.write_text(json.dumps({'question': 'q', 'answer': '1'}))
    task = jsonl.build(CharacterTokenizer(ASCII), str(path), kind, '', 0.25)
    assert task.final_answer(answer) == form


def test_every_kind_names_a_scorer_that_a_worker_can_import(path):
    path.write_text(json.dumps({'question': 'q', 'answer': '1'}))
    assert set(jsonl.KINDS) == set(choices('task.answer'))
    for kind in jsonl.KINDS:
        task = jsonl.build(CharacterTokenizer(ASCII), str(path), kind, '', 0.25)
        module, _, name = task.scorer.partition(':')
        assert getattr(importlib.import_module(module), name) is jsonl.KINDS[kind].score


def test_without_math_verify_the_command_that_installs_it_is_named(path, monkeypatch):
    monkeypatch.setattr(mathematics, 'is_installed', lambda: False)
    with pytest.raises(TaskError, match=rf"^task\.answer='math' needs .*: {re.escape(describe_install('tasks'))}$"):
        jsonl.build(CharacterTokenizer(ASCII), str(path), 'math', '', 0.25)


@pytest.mark.parametrize(
    ('kind', 'line', 'message'),
    [
        (
            'number',
            '{"question": "q", "answer": "none"}',
            r"the answer 'none' does not hold a number \(task\.answer=number\)",
        ),
        (
            'normalised',
            '{"question": "q", "answer": "\\"...\\""}',
            r'.* does not hold a final answer with a letter',
        ),
        ('number', '{"question": "q", "solution": "so 5"}', r"the solution 'so 5' marks no final answer"),
        (
            'math',
            r'{"question": "q", "answer": "\\frac{1"}',
            r'the gold answer .* cannot be parsed by math-verify',
        ),
        ('number', '{"answer": "1"}', r'.* question or problem is missing'),
        ('number', '{"problem": "1"}', r'.* answer or solution is missing'),
        ('integer', '{"question": "q"}', r'expected an object with question and answer'),
        ('integer', '[1, 2]', r'expected a JSON object, got'),
        ('integer', 'not json', r'not JSON \(Expecting value'),
        ('integer', '{"question": null, "answer": 1}', r'question=None must be a text'),
        ('integer', '{"question": 7, "answer": 1}', r'question=7 must be a text'),
        ('integer', '{"question": ["q"], "answer": 1}', r'question=a list must be a text'),
        ('integer', '{"question": " ", "answer": 1}', r"question=' ' must be a text that is not empty"),
        ('integer', '{"question": "q", "answer": null}', r'answer=None must be a text'),
        ('integer', '{"question": "q", "answer": true}', r'answer=True must be a text'),
        (
            'integer',
            '{"question": "q", "answer": 1e4000}',
            r"the answer '1e4000' does not end in an integer",
        ),
        ('integer', '{"question": "q", "answer": NaN}', r'answer=nan must be a text'),
        ('integer', '{"question": "q", "answer": 2.5}', r"the answer '2\.5' does not end in an integer"),
        (
            'integer',
            '{"question": "\\ud800", "answer": 1}',
            r"question has '\\ud800' at character 0, half of a",
        ),
        (
            'integer',
            '{"question": "q", "answer": "so\\n#### 2.5"}',
            r'the answer .* does not end in an integer',
        ),
        ('integer', '{"question": "q", "answer": "7 or so\\n#### unknown"}', r'the answer'),
    ],
)
def test_bad_line_is_named(path, kind, line, message):
    path.write_text(json.dumps(ROWS[0]) + '\n' + line + '\n')
    with pytest.raises(TaskError, match=rf'rows\.jsonl:2: {message}'):
        jsonl.read_problems(path, kind)
