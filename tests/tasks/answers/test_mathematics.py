"""The kind 'math'; docs/answers.md has more examples, which test_page.py checks."""

import signal
import threading

import math_verify
import pytest

from areal_jax.tasks.answers import gold_answers as golds
from areal_jax.tasks.answers import mathematics
from areal_jax.tasks.scoring.score_call import score_answer
from areal_jax.workers.worker_process import Finished


def test_it_needs_no_main_thread_and_touches_no_signal():
    rewards = []
    handler, alarm = signal.getsignal(signal.SIGALRM), signal.setitimer(signal.ITIMER_REAL, 1000.0)
    score = lambda: rewards.append(mathematics.score({'answer': r'\frac{1}{2}'}, r'\boxed{0.5}', 'stop'))
    thread = threading.Thread(target=score)
    thread.start()
    thread.join()
    score()
    left, _ = signal.setitimer(signal.ITIMER_REAL, *alarm)
    assert rewards == [1.0, 1.0]
    assert signal.getsignal(signal.SIGALRM) == handler
    assert left > 900  # math-verify's own timeout would have set another alarm, and then cleared it


def test_a_gold_is_parsed_once(monkeypatch):
    parsed = []
    parse = mathematics.parse_expression
    monkeypatch.setattr(mathematics, 'parse_expression', lambda text: parsed.append(text) or parse(text))
    for text in (r'\boxed{17x}', r'\boxed{18x}', r'\boxed{x \cdot 17}'):
        mathematics.score({'answer': '17x'}, text, 'stop')
    assert parsed == ['18x', '17x', r'x \cdot 17']  # the first answer is equal as it stands


def test_an_answer_that_was_cut_is_not_read():
    score = score_answer(mathematics.score, {'answer': '5'}, r'\boxed{5}', 'length')
    assert (score, score.label) == (0.0, 'ok')


def test_what_only_looks_like_mathematics_is_unparsed():
    for text in (r'\boxed{\frac{1}', r'#### \foo{', 'None of them, I think'):
        assert score_answer(mathematics.score, {'answer': '5'}, text, 'stop').label == 'unparsed'


def test_an_exception_of_the_comparison_is_not_counted_as_wrong(monkeypatch):
    monkeypatch.setattr(math_verify, 'verify', lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mathematics.score({'answer': '5x'}, r'\boxed{6x}', 'stop')


@pytest.mark.parametrize(
    ('gold', 'text', 'equal'),
    [
        ('1234', 'It is $1,234.00.', True),
        (r'\frac12', r'\boxed{0.5}', True),
        ('5', r'\boxed{6}', False),
        ('1+x', r'\boxed{x+1}', None),  # it knows no algebra
        (r'\text{(C)}', '#### (C)', True),
        ('5', '#### 5 apples', True),
        ('5', 'no idea', False),
        ('5', '4 or 5', True),  # the last number of a text without a mark
        ('x', 'y', None),
    ],
)
def test_the_comparison_of_the_audit_knows_text_and_numbers(gold, text, equal):
    assert mathematics.compare_texts(gold, text) is equal


def test_the_first_gold_that_cannot_be_parsed_is_found(monkeypatch):
    monkeypatch.setattr(golds, 'PER_PROCESS', 2)  # two processes where there are two cores
    good = ['36', r'\frac{3}{4}x', r'\text{Evelyn}', '(3, 4)', r'x \in [-2, 7]', '12:30']
    assert golds.find_fault([]) is None
    assert golds.find_fault(good) is None
    fault = golds.find_fault([*good, r'\sqrt{', '???'])
    assert fault == (r'\sqrt{', 'cannot be parsed by math-verify')


@pytest.mark.parametrize(
    ('gold', 'fault'),
    [
        ('12:30', ''),
        (r'\frac{\pi}{0}', ''),  # is itself, and no number
        ('12/0', "cannot be compared with itself (ValueError: Can't evaluate nan or zoo)"),
        ('9^{9^{9}}', 'is a number of too many digits'),
        ('10^{-999999}', 'is a number of too many digits'),
        (r'\sqrt{2} \cdot 10^{-30}', ''),
        ('12:00', 'cannot be parsed by math-verify'),
        (r'3:15 \text{ p.m.}', 'cannot be parsed by math-verify'),
        (r'\frac{1}', 'cannot be parsed by math-verify'),
        (r'a \equiv 3 \pmod 7', 'cannot be parsed by math-verify'),  # no part of it stands for it
    ],
)
def test_what_is_wrong_with_a_gold(gold, fault):
    assert mathematics.find_gold_fault(gold) == fault


def test_golds_of_one_shape_are_parsed_once(monkeypatch):
    asked = []
    parsed = [Finished(0, 6 * ['""'])]
    monkeypatch.setattr(golds, 'run_processes', lambda module, parts: asked.extend(parts) or parsed)
    plain = ['7', '1,000', 'two', r'\frac{5}{2}x', r'\frac{33}{4}x', r'\frac{3.5}{4}y', '3y']
    golds.find_fault([*plain, '0y', r'\frac{y}{0}', '2^{33}y', '2^{5}y'])
    assert asked == [[r'"\\frac{5}{2}x"', r'"\\frac{3.5}{4}y"', '"3y"', r'"\\frac{y}{0}"', '"2^{33}y"', '"2^{5}y"']]


def test_a_gold_that_is_never_parsed_ends_its_process_and_is_named(monkeypatch, tmp_path):
    # the gold is parsed by a program that hangs in C code at 'x'
    (tmp_path / 'hang.py').write_text(
        'import re\n'
        'from areal_jax.tasks.answers import gold_answers as golds, mathematics\n'
        'golds._SECONDS = 1\n'
        "mathematics.find_gold_fault = lambda gold: str(re.match('(a*)*b', 'a' * 40) if gold == 'x' else '')\n"
        'golds.main()\n'
    )
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    monkeypatch.setattr(golds, '__name__', 'hang')
    assert golds.find_fault(['y', 'x', 'z']) == ('x', 'takes more than 10 s to parse')
