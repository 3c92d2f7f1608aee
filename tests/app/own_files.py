"""Files of own functions for tiny runs: copies of what is built in, which must give the same run bit for bit."""

# The task token_reversal, its reward, the advantage 'group' and the workflow 'single_turn'.
COPIES = """import itertools
import numpy as np
from areal_jax.rollout.workflow import SingleTurn
from areal_jax.tasks.task import ListedTask, hash_fraction

def build(tokenizer, symbols=2, length=4, held_out_fraction=0.25):
    strings = [''.join(letters) for letters in itertools.product('abcdefgh'[:symbols], repeat=length)]
    held_out = sorted(strings, key=hash_fraction)[:round(held_out_fraction * len(strings))]
    make = lambda text: {'question': text + '=', 'answer': text[::-1]}
    sides = {'train': [make(s) for s in strings if s not in held_out]}
    sides['held_out'] = [make(s) for s in strings if s in held_out]
    messages = lambda problem: [{'role': 'user', 'content': problem['question']}]
    return ListedTask('token_reversal', score, sides, messages, tokenizer)

def score(problem, answer_text, finish_reason):
    truth, answer = [*problem['answer'], 'end'], [*answer_text]
    answer += ['end'] if finish_reason == 'stop' else []
    return sum(a == b for a, b in zip(truth, answer)) / max(len(truth), len(answer))

def advantage(rewards, groups):
    assert rewards.dtype == np.float64 and groups.dtype.kind == 'i' and rewards.shape == groups.shape
    found = np.zeros(len(rewards))
    for group in np.unique(groups):
        mine = groups == group
        found[mine] = (rewards[mine] - rewards[mine].mean()) / (rewards[mine].std() + 1e-4)
    return found

def workflow(pool, seed, sampling, decode, depth=3):
    return SingleTurn(pool, sampling, seed)
"""
