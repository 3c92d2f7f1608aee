"""Mixtures of tasks: shares that hold for every number of draws, and a stream that continues where it was saved."""

from __future__ import annotations

import fractions
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.tasks.mixture import Interleaving, Mixture, MixtureStream, final_answer, naming_source, split_problems
from areal_jax.tasks.questions import question_task
from areal_jax.tasks.task import ClientStream, TaskError
from areal_jax.text.tokenizer import CharacterTokenizer

TOKENIZER = CharacterTokenizer('ab=+0123456789')
WEIGHTS = st.one_of(st.floats(1e-6, 1e6), st.integers(1, 50).map(float), st.sampled_from([0.1, 0.2, 0.3, 1 / 3, 1.0]))


def score(problem, answer_text, finish_reason):
    return float(answer_text == problem['answer'])


def make_task(name, count, held_out_fraction=0.5):
    problems = ({'question': f'{number}=', 'answer': str(number)} for number in range(count))
    return question_task(TOKENIZER, problems, score, name=name, held_out_fraction=held_out_fraction)


def make_mixture(**counts):
    tasks = {name: make_task(name, count) for name, count in counts.items()}
    return Mixture(tasks, dict(zip(tasks, (2.0, 1.0, 0.5), strict=False)))


def draw(stream, n):
    return [stream.draw() for _ in range(n)]


def shown(prompts):
    return [(prompt.draw, prompt.source, prompt.problem['question']) for prompt in prompts]


@settings(max_examples=200, deadline=None)
@given(st.lists(WEIGHTS, min_size=1, max_size=12), st.integers(1, 400))
def test_after_every_draw_each_source_has_its_share_to_within_one(weights, draws):
    named = {f's{index}': weight for index, weight in enumerate(weights)}
    exact = {name: fractions.Fraction(repr(weight)) for name, weight in named.items()}
    whole = sum(exact.values())
    order = Interleaving(named)
    for n in range(1, draws + 1):
        order.draw()
        assert sum(order.counts.values()) == n
        for name, count in order.counts.items():
            assert abs(count - n * exact[name] / whole) < 1


def test_many_small_sources_and_a_large_one():
    """A rule that takes the source furthest behind breaks the bound here: all small ones fall behind together."""
    named = {'large': 40.0, **{f'small{index}': 1.0 for index in range(60)}}
    order = Interleaving(named)
    for n in range(1, 501):
        order.draw()
        assert all(abs(order.counts[name] - n * weight / 100) < 1 for name, weight in named.items())


def test_the_order_by_hand():
    # w = 2/3, 1/3: a may have its draws 0, 1, 2 from 0, 1, 3 on and must before 2, 3, 5; b from 0, 3 on, before 3, 6
    order = Interleaving({'a': 2.0, 'b': 1.0})
    assert ''.join(order.draw() for _ in range(9)) == 'aabaabaab'
    order = Interleaving({'a': 0.1, 'b': 0.3})  # 1 : 3, although 0.1 and 0.3 are no binary fractions
    # a has 0 in [0, 4), 1 in [4, 8); b in [0, 2), [1, 3), [2, 4), [4, 6), [5, 7), [6, 8); of equal ends a is first
    assert ''.join(order.draw() for _ in range(8)) == 'bbabbbab'


def test_the_draws_of_a_source_are_those_of_its_task_alone():
    mixture = make_mixture(easy=9, hard=7)
    prompts = draw(mixture.prompts('train', 3), 60)
    assert [prompt.draw for prompt in prompts] == list(range(60))
    for source, task in mixture.tasks.items():
        own = [prompt for prompt in prompts if prompt.source == source]
        alone = draw(task.prompts('train', 3), len(own))
        assert [p.problem for p in own] == [p.problem for p in alone]
        assert all(np.array_equal(p.tokens, q.tokens) for p, q in zip(own, alone, strict=True))
    assert {source: sum(p.source == source for p in prompts) for source in mixture.tasks} == {'easy': 40, 'hard': 20}
    assert shown(prompts) != shown(draw(mixture.prompts('train', 4), 60))


@pytest.mark.parametrize('before', [0, 1, 7, 25])
def test_a_stream_continues_where_it_was_saved(before):
    mixture = make_mixture(easy=9, hard=7, third=5)
    whole = draw(mixture.prompts('train', 0), 50)
    saved = mixture.prompts('train', 0)
    draw(saved, before)
    state = json.loads(json.dumps(saved.state()))
    resumed = mixture.prompts('train', 0)
    resumed.restore(state)
    assert shown(draw(resumed, 50 - before)) == shown(whole[before:])
    assert resumed.state() == {**resumed.state(), 'counts': {'easy': 29, 'hard': 14, 'third': 7}}


def test_a_state_of_another_mixture_is_refused():
    state = make_mixture(easy=9, hard=7).prompts('train', 0).state()
    other = Mixture(make_mixture(easy=9, hard=7).tasks, {'easy': 1.0, 'hard': 1.0}).prompts('train', 0)
    with pytest.raises(
        TaskError, match=r"weights \{'easy': 2\.0, 'hard': 1\.0\}, this one \{'easy': 1\.0, 'hard': 1\.0\}"
    ):
        other.restore(state)


def test_every_client_has_the_shares_of_the_whole():
    mixture = Mixture(make_mixture(easy=9, hard=7).tasks, {'easy': 1.0, 'hard': 1.0})
    clients = [mixture.prompts('train', 0, lambda s, c=c: ClientStream(s, c, 2)) for c in range(2)]
    parts = [draw(stream, 20) for stream in clients]
    assert [[p.source for p in part].count('easy') for part in parts] == [10, 10]
    whole = draw(mixture.tasks['easy'].prompts('train', 0), 20)
    of_easy = [[p.problem for p in part if p.source == 'easy'] for part in parts]
    assert of_easy == [[p.problem for p in whole[0::2]], [p.problem for p in whole[1::2]]]


def test_held_out_problems_are_mixed_by_weight_until_a_source_has_no_more():
    mixture = make_mixture(easy=6, hard=40)
    sizes = {source: task.sizes()['held_out'] for source, task in mixture.tasks.items()}
    assert mixture.sizes()['held_out'] == sum(sizes.values())
    first = [prompt.source for prompt in mixture.held_out(3, 0)]
    assert first == ['easy', 'easy', 'hard']
    everything = mixture.held_out(10**6, 0)
    assert [prompt.draw for prompt in everything] == list(range(sum(sizes.values())))
    assert {source: sum(p.source == source for p in everything) for source in sizes} == sizes
    assert len({(p.source, p.problem['question']) for p in everything}) == len(everything)
    assert shown(mixture.held_out(5, 0)) == shown(everything[:5])  # fewer are the first of more


def test_a_source_without_a_problem_is_named():
    tasks = {'full': make_task('full', 9), 'empty': make_task('empty', 9, held_out_fraction=1.0)}
    with pytest.raises(TaskError, match=r"^task\.sources\.empty: task 'empty' has no problem on the side 'train'"):
        Mixture(tasks, {'full': 1.0, 'empty': 1.0}).prompts('train', 0)


def test_an_error_of_one_task_names_no_source():
    with pytest.raises(TaskError, match=r'^it fails$'), naming_source(''):
        raise TaskError('it fails')
    with pytest.raises(TaskError, match=r'^task\.sources\.a: it fails$'), naming_source('a'):
        raise TaskError('it fails')


def test_a_final_answer_is_read_by_the_task_of_the_prompt():
    mixture = make_mixture(easy=9, hard=7)
    mixture.tasks['hard'].final_answer = lambda text: f'hard {text}'
    first, _, third = draw(mixture.prompts('train', 0), 3)
    assert (first.source, third.source) == ('easy', 'hard')
    assert (final_answer(mixture, first, '7'), final_answer(mixture, third, '7')) == ('7', 'hard 7')
    alone = make_task('alone', 9)
    assert split_problems(alone) == {'': alone}
    assert final_answer(alone, alone.prompts('train', 0).draw(), '7') == '7'


def test_a_stream_of_streams_numbers_its_draws():
    assert isinstance(make_mixture(easy=9).prompts('train', 0), MixtureStream)
    assert [p.draw for p in draw(make_mixture(easy=3).prompts('train', 0), 7)] == list(range(7))
