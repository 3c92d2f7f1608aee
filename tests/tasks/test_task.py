from __future__ import annotations

import json

import numpy as np
import pytest

from areal_jax.tasks.task import ListedTask, TaskError, hash_fraction, shuffle
from areal_jax.text.tokenizer import CharacterTokenizer, chat_messages


def no_reward(problem, answer_text, finish_reason):
    return 0.0


def make_task(n_train: int = 5, n_held_out: int = 3) -> ListedTask:
    return ListedTask(
        'letters',
        no_reward,
        {
            'train': [{'question': letter} for letter in 'abcdefgh'[:n_train]],
            'held_out': [{'question': letter} for letter in 'vwxyz'[:n_held_out]],
        },
        lambda problem: chat_messages(problem['question']),
        CharacterTokenizer('abcdefghvwxyz'),
    )


def draw(stream, n):
    return [stream.draw() for _ in range(n)]


def test_every_epoch_has_every_problem_once_in_an_order_of_its_own():
    prompts = draw(make_task().prompts('train', seed=0), 50)
    assert [prompt.draw for prompt in prompts] == list(range(50))
    questions = [prompt.problem['question'] for prompt in prompts]
    epochs = [''.join(questions[start : start + 5]) for start in range(0, 50, 5)]
    assert all(sorted(epoch) == list('abcde') for epoch in epochs)
    assert len(set(epochs)) > 5  # ten draws out of 120 orders


def test_neighbouring_draws_differ_inside_an_epoch():
    prompts = draw(make_task(8).prompts('train', seed=1), 8)
    assert len({prompt.problem['question'] for prompt in prompts}) == 8


def test_prompt_carries_tokens_and_task():
    prompt = make_task(1).prompts('train', seed=0).draw()
    np.testing.assert_array_equal(prompt.tokens, np.array([1], np.int32))
    assert prompt.tokens.dtype == np.int32
    assert (prompt.task, prompt.problem) == ('letters', {'question': 'a'})


def test_order_depends_on_the_seed():
    orders = {tuple(shuffle(8, seed, 0)) for seed in range(10)}
    assert len(orders) == 10


def test_order_is_the_same_for_ever():
    # ranks of raw Philox4x64 output under the key (seed, epoch): part of what a saved stream means
    assert shuffle(6, 3, 1).tolist() == [3, 5, 4, 0, 2, 1]


@pytest.mark.parametrize('n', [0, 3, 5, 12])
def test_restored_stream_goes_on_exactly(n):
    stream = make_task().prompts('train', seed=7)
    draw(stream, n)
    state = json.loads(json.dumps(stream.state()))
    expected = [(prompt.draw, prompt.problem) for prompt in draw(stream, 11)]
    restored = make_task().prompts('train', seed=7)
    restored.restore(state)
    assert [(prompt.draw, prompt.problem) for prompt in draw(restored, 11)] == expected
    assert expected[0][0] == n


def test_state_of_another_stream_is_refused():
    state = make_task().prompts('train', seed=7).state()
    with pytest.raises(TaskError, match='seed=7, this one seed=8'):
        make_task().prompts('train', seed=8).restore(state)
    with pytest.raises(TaskError, match='size=5, this one size=3'):
        make_task().prompts('held_out', seed=7).restore(state)


def test_held_out_problems_are_distinct_and_counted_from_0():
    prompts = make_task().held_out(2, seed=0)
    assert [prompt.draw for prompt in prompts] == [0, 1]
    assert prompts[0].problem != prompts[1].problem
    # 3 is all there is
    assert sorted(p.problem['question'] for p in make_task().held_out(64, seed=0)) == ['v', 'w', 'x']
    assert make_task().held_out(0, seed=0) == []


def test_empty_side_is_named_when_it_is_needed():
    task = make_task(n_held_out=0)
    assert task.held_out(0, seed=0) == []
    with pytest.raises(TaskError) as error:
        task.held_out(1, seed=0)
    assert str(error.value) == (
        "task 'letters' has no problem on the side 'held_out': 5 are on the side 'train'; change "
        'task.held_out_fraction, or set evaluation.problems=0'
    )


def test_a_side_that_was_dropped_whole_says_so():
    with pytest.raises(TaskError, match=r'3 were dropped as too long; change .*, or raise rollout\.context_tokens$'):
        make_task(0, 3).fitting(0, 'drop').prompts('train', seed=0)


def test_a_problem_that_has_no_prompt_is_named():
    task = ListedTask(
        'letters',
        no_reward,
        {'train': [{'question': 'a'}, {'question': 'ä'}], 'held_out': []},
        lambda problem: chat_messages(problem['question']),
        CharacterTokenizer('a'),
    )
    with pytest.raises(TaskError, match=r"^task 'letters': the problem 'ä': 'ä' has characters \['ä'\]"):
        task.fitting(8, 'refuse')


def test_prompts_are_tokenized_once_and_cannot_be_changed():
    task = make_task()
    stream = task.prompts('train', seed=0)
    first = {prompt.problem['question']: prompt.tokens for prompt in draw(stream, 5)}
    assert all(first[prompt.problem['question']] is prompt.tokens for prompt in draw(stream, 5))
    with pytest.raises(ValueError, match='read-only'):
        first['a'][0] = 7


def test_scorer_is_where_a_worker_finds_it():
    assert make_task().scorer == 'tests.tasks.test_task:no_reward'


def test_hash_fraction_is_stable_and_even():
    # sha256('7 + 8') begins with fe87c988a8ba
    assert hash_fraction('7 + 8') == 0xFE87C988A8BA / 2**48
    values = [hash_fraction(str(n)) for n in range(4000)]
    assert 0 <= min(values) < max(values) < 1
    # standard deviation of the share: sqrt(.25 * .75 / 4000) = .007
    assert np.mean(np.array(values) < 0.25) == pytest.approx(0.25, abs=0.028)
