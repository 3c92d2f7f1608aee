import json

import numpy as np
import pytest

from areal_jax.tasks.demonstrations import contrast_task, read_pairs
from areal_jax.tasks.task import TaskError
from areal_jax.tasks.token_reversal import build, characters
from areal_jax.text.tokenizer import CharacterTokenizer

TOKENIZER = CharacterTokenizer(''.join(map(chr, range(32, 127))))
GOOD = {'prompt': 'p?', 'chosen': 'yes', 'rejected': 'no'}


def read(tmp_path, *rows, held_out_fraction=0.0, system_prompt=''):
    path = tmp_path / 'pairs.jsonl'
    path.write_text('\n'.join(row if isinstance(row, str) else json.dumps(row) for row in rows) + '\n')
    return read_pairs(str(path), TOKENIZER, system_prompt, held_out_fraction)


def texts(pairs):
    return [tuple(TOKENIZER.decode(t) for t in (p.prompt_tokens, *p.answers)) for p in pairs]


def test_a_line_is_a_prompt_and_two_answers_with_end_tokens(tmp_path):
    (pair,) = read(tmp_path, GOOD).train
    assert texts([pair]) == [('p?', 'yes', 'no')]
    assert [answer[-1] for answer in pair.answers] == [TOKENIZER.eos_id] * 2
    # 2 + 4 - 1 and 2 + 3 - 1 tokens are read, 4 and 3 are in the loss
    assert pair.size == (9, 7)


def test_a_prompt_may_be_a_conversation(tmp_path):
    turns = [{'role': r, 'content': c} for r, c in (('user', 'a'), ('assistant', 'b'), ('user', 'c'))]
    assert texts(read(tmp_path, GOOD | {'prompt': turns}).train) == [('abc', 'yes', 'no')]
    assert texts(read(tmp_path, GOOD | {'prompt': turns}, system_prompt='S').train) == [('Sabc', 'yes', 'no')]


def test_pairs_of_one_prompt_are_on_one_side_as_a_group_of_two(tmp_path):
    rows = [GOOD | {'prompt': f'{n}?', 'rejected': f'no {i}'} for n in range(30) for i in range(2)]
    found = read(tmp_path, *rows, held_out_fraction=0.25)
    prompts = [{p for p, _, _ in texts(side)} for side in (found.train, found.held_out)]
    assert prompts[0] & prompts[1] == set()
    assert len(prompts[0] | prompts[1]) == 30
    group = found.stream(seed=0).draw()
    chosen, rejected = (TOKENIZER.decode(t.segments[0].tokens) for t in group.trajectories)
    assert (chosen, rejected[:2]) == ('yes', 'no')


@pytest.mark.parametrize(
    ('row', 'message'),
    [
        ('{"prompt": "p", "chosen": NaN, "rejected": "no"}', r'pairs\.jsonl:2: chosen=nan must be a text that is not'),
        (GOOD | {'rejected': '  '}, r"pairs\.jsonl:2: rejected='  ' must be a text that is not empty"),
        (GOOD | {'chosen': None}, r'pairs\.jsonl:2: chosen=None must be a text'),
        ({'prompt': 'p'}, r'pairs\.jsonl:2: expected an object with prompt, .*, chosen and rejected is missing'),
        (GOOD | {'rejected': 'yes'}, r'pairs\.jsonl:2: chosen and rejected are the same answer: remove the line'),
        (GOOD | {'prompt': 3}, r'pairs\.jsonl:2: prompt=3 must be a text'),
        (GOOD | {'prompt': ['p']}, r'pairs\.jsonl:2: prompt must be a list of objects with role and content'),
        (GOOD | {'prompt': [{'role': 'user'}]}, r'pairs\.jsonl:2: prompt\[0\] needs content, each a text'),
        (
            GOOD | {'prompt': [{'role': r, 'content': 'x'} for r in ('user', 'assistant')]},
            r"pairs\.jsonl:2: the prompt ends with the role 'assistant'; it must end with user",
        ),
        ('{"prompt"', r'pairs\.jsonl:2: not JSON'),
    ],
)
def test_a_bad_line_is_named_with_the_fault(tmp_path, row, message):
    with pytest.raises(TaskError, match=message) as error:
        read(tmp_path, GOOD, row)
    assert '\n' not in str(error.value)


def test_a_pair_that_fits_no_row_is_named_with_the_sizes_it_needs(tmp_path):
    found = read(tmp_path, GOOD, GOOD | {'prompt': 'longer?'})
    with pytest.raises(TaskError, match=r'pairs\.jsonl:2 takes 19 .*1 of 2 pairs are too long: raise learner\.row_tok'):
        found.fitting((18, 7), 'refuse')
    kept = found.fitting((18, 7), 'drop')
    assert (len(kept.train), kept.dropped, kept.noun) == (1, 1, 'pair')


def test_another_file_is_no_file_to_resume_with(tmp_path):
    state = read(tmp_path, GOOD).stream(0).state()
    with pytest.raises(TaskError, match='not those of the saved run'):
        read(tmp_path, GOOD | {'rejected': 'nope'}).stream(0).restore(state)


def test_the_answers_of_a_task_are_chosen_above_those_of_other_problems():
    tokenizer = CharacterTokenizer(characters(2))
    found = contrast_task(build(tokenizer, symbols=2, length=3, held_out_fraction=0.25), tokenizer)
    assert (len(found.train), len(found.held_out)) == (6, 2)
    for pair in found.train + found.held_out:
        prompt, chosen, rejected = (tokenizer.decode(t) for t in (pair.prompt_tokens, *pair.answers))
        assert prompt[2::-1] == chosen != rejected
        assert not np.array_equal(*pair.answers)
