"""Answers in a terminal: what is shown of a group, in how many columns, and in which order."""

from __future__ import annotations

import pytest

from areal_jax.errors import UserError
from areal_jax.telemetry import rollout_views

LONG = 'one two three four five six seven eight nine ten eleven twelve ' * 4


def answer(sample, reward, text, **fields):
    return {
        'sample': sample, 'row': 0, 'reward': reward, 'label': 'ok', 'finish': 'stop', 'engine': 'engine/0',
        'advantage': None, 'text': text, 'tokens': list(range(4)), 'versions': [[2, 3], [2, 4]], 'ages': [1, 0],
        'characters': [len(text) // 2, 0, 0, len(text) - len(text) // 2], 'behavior_logprobs': [-1.0, -2.0, -3.0, -4.0],
        **fields,
    }  # fmt: skip


def group(update, draw, *answers):
    return {
        'update': update, 'draw': draw, 'task': 'sums', 'trained': True, 'answers': list(answers),
        'prompt': {'text': '<user>\n1 + 1<assistant>', 'tokens': [1]}, 'problem': {'question': '1 + 1', 'answer': '2'},
    }  # fmt: skip


GROUPS = [
    group(1, 5, answer(0, 0.5, 'a', advantage=[1.0, 2.0, None, 3.0]), answer(1, 1.0, 'b\x1b[2J\nc', advantage=-1.0)),
    group(2, 6, answer(0, 0.25, LONG, ages=[4, None]), answer(1, 0.25, 'x', tokens=[1])),
]


@pytest.mark.parametrize(
    ('order', 'first'),
    [
        ('update', (6, 0)), ('-update', (5, 0)), ('reward', (5, 1)), ('-reward', (6, 0)), ('advantage', (5, 0)),
        ('age', (6, 0)), ('-length', (6, 1)),
    ],
)  # fmt: skip
def test_the_order_of_answers(order, first):
    answers = rollout_views.sort_answers(GROUPS, order)
    assert (answers[0].group['draw'], answers[0].answer['sample']) == first
    assert len(answers) == 4


@pytest.mark.parametrize('width', [80, 100, 160])
def test_lines_fit_and_no_answer_acts_on_the_terminal(width):
    table = rollout_views.render_table(rollout_views.sort_answers(GROUPS, 'update'), width)
    shown = [
        table,
        *(rollout_views.render_group(one, one['answers'], width) for one in GROUPS),
        rollout_views.render_contrast(*rollout_views.choose_contrast(GROUPS), width),
        rollout_views.render_contrast(GROUPS[1], *GROUPS[1]['answers'], width),
        rollout_views.render_versions(GROUPS[1], GROUPS[1]['answers'][0], width),
    ]
    for text in shown:
        assert max(map(len, text.splitlines())) <= width
        assert text.replace('\n', '').isprintable()
    assert 'b\\x1b[2J\\nc' in table
    assert '   2.000 ' in table  # the mean of the advantages by token
    assert 'twelve' in shown[2]


def test_a_group_in_full_has_prompt_problem_and_whole_texts():
    text = rollout_views.render_group(GROUPS[1], GROUPS[1]['answers'], 100)
    words = ' '.join(line.strip() for line in text.splitlines())
    assert LONG.strip() in words
    assert 'prompt <user> 1 + 1<assistant>  problem question: 1 + 1 answer: 2' in words


def test_best_and_worst_stand_beside_each_other():
    one, best, worst = rollout_views.choose_contrast(GROUPS)
    assert (one['draw'], best['reward'], worst['reward']) == (5, 1.0, 0.5)
    lines = rollout_views.render_contrast(one, best, worst, 100).splitlines()
    assert lines[-2].split('|') == ['b\\x1b[2J'.ljust(49), ' a']
    assert lines[-1].split('|') == ['c'.ljust(49), '']
    with pytest.raises(UserError, match='--diff needs a group of two answers'):
        rollout_views.choose_contrast([group(1, 1, answer(0, 1.0, 'a'))])


def test_an_answer_by_version():
    text = rollout_views.render_versions(
        GROUPS[0], answer(0, 0.5, 'abcd', policy_logprobs=[-1.0, -1.5, -2.0, -3.0]), 100
    )
    assert 'version 3, age 1: 2 tokens; mean log-prob: behavior -1.500, policy -1.250\n  ab' in text
    assert 'version 4, age 0: 2 tokens; mean log-prob: behavior -3.500, policy -2.500\n  cd' in text


def test_wide_characters_count_twice():
    assert rollout_views.cut_text('数' * 10, 20) == '数' * 10
    assert rollout_views.cut_text('数' * 10, 19) == '数' * 8 + '...'


def test_what_is_not_kept_is_said():
    with pytest.raises(UserError, match='--step=3: no answers of it are kept; of updates 1 to 2 some are'):
        rollout_views.select_groups(GROUPS, 3, None)
    with pytest.raises(UserError, match='--draw=6 is not kept; of draws 5 to 5 1 are'):
        rollout_views.select_groups(GROUPS, 1, 6)
