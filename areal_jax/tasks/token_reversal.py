"""The task `token_reversal`: repeat the symbols backwards. A tiny model learns it from random weights in seconds."""

from __future__ import annotations

import itertools

from areal_jax.tasks.task import ListedTask, Problem, TaskError, hash_fraction
from areal_jax.text.tokenizer import CharacterTokenizer, Tokenizer
from areal_jax.types import FinishReason

ALPHABET = 'abcdefgh'
MARK = '='  # ends the prompt: the answer begins after it
MAX_STRINGS = 2**16  # all strings are listed: bounds start-up time and memory


def characters(symbols: int) -> str:
    """The characters that a CharacterTokenizer for this task needs."""
    return ALPHABET[:symbols] + MARK


def build(tokenizer: Tokenizer, symbols: int, length: int, held_out_fraction: float) -> ListedTask:
    """Every string of `length` out of `symbols` letters, e.g. 'abbb=' whose answer is 'bbba'.

    The strings with the lowest hashes are held out, round(held_out_fraction * count) of them and at least one, so that
    the sides never overlap, however few strings there are (2 symbols, length 4: 12 and 4). Raises TaskError when there
    are too few or too many strings.
    """
    if not 2 <= symbols <= len(ALPHABET) or length < 1 or symbols**length > MAX_STRINGS:
        raise TaskError(
            f'task.symbols={symbols}, task.length={length}: choose 2 to {len(ALPHABET)} symbols and a length of at '
            f'least 1 with symbols**length <= {MAX_STRINGS}'
        )
    strings = [''.join(letters) for letters in itertools.product(ALPHABET[:symbols], repeat=length)]
    n_held_out = max(1, round(held_out_fraction * len(strings)))
    held_out = set(sorted(strings, key=hash_fraction)[:n_held_out])
    return ListedTask(
        'token_reversal',
        score,
        {
            'train': [_make_problem(s) for s in strings if s not in held_out],
            'held_out': [_make_problem(s) for s in strings if s in held_out],
        },
        lambda problem: [{'role': 'user', 'content': problem['question']}],
        tokenizer,
    )


def score(problem: Problem, answer_text: str, finish_reason: FinishReason) -> float:
    """Fraction of positions where the answer is right; the end counts as a position.

    The denominator is the length of the longer of answer and truth. The reward is dense, so that a random policy gets
    a signal; it is 1 only for the exact answer that ends by itself. An EOS that did not end the answer
    (rollout.ignore_eos) is one wrong symbol.
    """
    truth = [*problem['answer'], 'end']
    symbols = answer_text.replace(CharacterTokenizer.eos_text, '\0')
    answer = [*symbols, 'end'] if finish_reason == 'stop' else list(symbols)
    right = sum(a == b for a, b in zip(truth, answer, strict=False))
    return right / max(len(truth), len(answer))


def _make_problem(string: str) -> Problem:
    return {'question': string + MARK, 'answer': string[::-1]}
