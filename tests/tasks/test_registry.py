from __future__ import annotations

import pytest

from areal_jax.tasks import registry, token_reversal
from areal_jax.tasks.scoring.worker import load_scorer
from areal_jax.tasks.task import TaskError
from areal_jax.text.tokenizer import CharacterTokenizer


def test_task_is_built_from_its_values():
    tokenizer = CharacterTokenizer(token_reversal.characters(3))
    task = registry.make_task('token_reversal', tokenizer, symbols=3, length=2, held_out_fraction=0.25)
    assert task.name == 'token_reversal'
    assert len(task.held_out(99, seed=0)) == 2  # round(9 / 4)


def test_value_names_are_the_fields_a_task_uses():
    assert registry.value_names('reasoning_gym') == ('datasets', 'dataset_size', 'system_prompt', 'held_out_fraction')
    assert registry.value_names('token_reversal') == ('symbols', 'length', 'held_out_fraction')
    assert registry.value_names('jsonl') == (*('path', 'answer', 'system_prompt', 'held_out_fraction', 'columns'),)


def test_scorer_of_a_task_is_what_a_worker_loads():
    task = registry.make_task('token_reversal', CharacterTokenizer('ab='), symbols=2, length=4, held_out_fraction=0.25)
    assert load_scorer(task.scorer)({'answer': 'ab'}, 'ab', 'stop') == 1.0


def test_unknown_name_names_the_known():
    with pytest.raises(
        TaskError, match=r"task\.name='chess' .*\['code', 'jsonl', 'reasoning_gym', 'running_sums', 'token_reversal'\]"
    ):
        registry.make_task('chess', CharacterTokenizer('a'))


def test_value_that_the_task_does_not_use_is_named():
    with pytest.raises(TaskError, match=r"'token_reversal' does not use \['datasets'\]; it takes \['symbols'"):
        registry.make_task('token_reversal', CharacterTokenizer('ab='), datasets=('products',))
