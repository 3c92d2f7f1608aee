"""Every recipe of configs/recipes/ is valid at both sizes; the tiny one trains, and learns."""

from __future__ import annotations

import pathlib
from statistics import mean

import numpy as np
import pytest

from areal_jax.app.command_line import CommandLineError, load_config
from areal_jax.app.library import build_run
from areal_jax.config import TrackedConfig, validate
from areal_jax.config.loss import find_objective_warnings
from areal_jax.config.objectives import OBJECTIVES, build_choices, find_objective
from areal_jax.learning.objective.advantages import shape_rewards
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import FILE, read_metrics
from tests.learning.examples import group

ROOT = pathlib.Path(__file__).parents[2]
RECIPES = {path.stem: path for path in sorted((ROOT / 'configs' / 'recipes').glob('[!_]*.py'))}
OF_THEIR_OWN = {'dpo', 'reward_model', 'distillation'}  # trained by run/test_preference.py
REWARDED = [name for name in RECIPES if name not in OF_THEIR_OWN]
AT_EVERY_CHANGE = {'grpo', 'oapl', 'ppo_critic', 'dg'}  # their programs differ most; others are slow
WARNED = {'vcpo'}  # its weight is the product over an answer, and the full size has long ones
SEEDS = (1, 2, 3)
WINDOW = 15  # updates, at either end


def train(config, workdir, **fields):
    """The rows of metrics of a run under the virtual clock."""
    config.run.clock = 'virtual'
    config.run.export = False
    config.evaluation.problems = 0
    for section, field in (('telemetry', name) for name in ('tensorboard', 'plots', 'progress')):
        config[section][field] = False
    config.update_from_flattened_dict({name.replace('__', '.'): value for name, value in fields.items()})
    build_run(config, workdir).train()
    return read_metrics(workdir / FILE)


@pytest.mark.parametrize('size', ['', ':tiny'])
@pytest.mark.parametrize('name', RECIPES)
def test_a_recipe_is_valid(name, size):
    config = load_config(f'{RECIPES[name]}{size}')
    if find_objective(config.loss.objective).teacher:
        config.loss.teacher = 'TEACHER'  # the command line names it, and the file of pairs
    if config.task.name == 'jsonl':
        config.task.path = config.task.path or 'pairs.jsonl'
    assert validate(config) is None
    assert list(find_objective_warnings(config)) == [] or (name in WARNED and not size)
    assert config.loss.objective in OBJECTIVES


def test_there_is_a_recipe_for_every_kind_of_choice():
    named = {load_config(str(path)).loss.objective for path in RECIPES.values()}
    assert named >= {'decoupled_ppo', 'grpo', 'dr_grpo', 'dapo', 'gspo', 'cispo', 'rloo', 'reinforce_pp', 'm2po'}
    assert named >= {'oapl', 'dg', 'sapo', 'tis', 'icepop', 'vcpo', 'dpo', 'distillation'}
    assert named >= {'ppo_critic', 'reward_model'}


@pytest.mark.parametrize('size', ['', ':tiny'])
@pytest.mark.parametrize('name', REWARDED)
def test_rewards_are_shaped_as_the_paper_has_them(name, size):
    config = load_config(f'{RECIPES[name]}{size}')
    longest, buffer = {'': (20480, 4096), ':tiny': (config.rollout.max_new_tokens, 2)}[size]
    lengths = [1, longest - buffer, longest - buffer // 2, longest - buffer // 4, longest]
    penalties = [0.0, 0.0, 0.5, 1 - (buffer // 4) / buffer, 1.0]  # DAPO, equation 13: between 0 and -1
    wrong, right, is_long = {'dapo': (-1, 1, 1), 'areal_math': (-5, 5, 0)}.get(name, (0, 1, 0))
    choices = build_choices(TrackedConfig(config).loss, config.rollout.max_new_tokens, config.run.seed)
    for reward, shaped in ((0.0, wrong), (1.0, right)):
        answers = group([1], [[2] * n for n in lengths], [reward] * 5)
        expected = [shaped - is_long * penalty for penalty in penalties]
        np.testing.assert_allclose(shape_rewards(answers, choices), expected, atol=1e-12)


def test_the_penalty_of_dapo_is_one_at_any_scale_of_the_reward():
    config = load_config(str(RECIPES['dapo']))
    config.loss.reward_scale = 10.0
    answers = group([1], [[2], [2] * 20480], [1.0, 1.0])
    np.testing.assert_allclose(
        shape_rewards(
            answers, build_choices(TrackedConfig(config).loss, config.rollout.max_new_tokens, config.run.seed)
        ),
        [5.0, 4.0],
    )


def test_an_unknown_size_is_refused():
    with pytest.raises(CommandLineError, match=r"'huge' is no size of a recipe: use ':tiny'"):
        load_config(f'{RECIPES["grpo"]}:huge')


@pytest.mark.parametrize(
    'name', [pytest.param(name, marks=[] if name in AT_EVERY_CHANGE else [pytest.mark.slow]) for name in REWARDED]
)
def test_the_tiny_size_trains(name, tmp_path):
    rows = train(load_config(f'{RECIPES[name]}:tiny'), tmp_path / name, run__steps=2)
    assert [row[names.STEP] for row in rows] == [1, 2]
    assert sum(row[names.OPTIMIZER_STEPS] for row in rows) >= 2
    assert sum(row[names.SKIPPED_STEPS] for row in rows) == 0


@pytest.mark.slow
@pytest.mark.parametrize('name', REWARDED)
def test_the_tiny_size_learns(name, tmp_path):
    for seed in SEEDS:
        rows = train(load_config(f'{RECIPES[name]}:tiny'), tmp_path / str(seed), run__seed=seed)
        rewards = [row[names.REWARD_MEAN] for row in rows]
        first, last = mean(rewards[:WINDOW]), mean(rewards[-WINDOW:])
        print(f'{name} seed {seed}: {first:.3f} -> {last:.3f}')
        assert last > first
