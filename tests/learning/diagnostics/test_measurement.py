"""What an update reports of its data: rewards, ages, mismatch, and a policy in 8 bits."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from areal_jax.learning.diagnostics.measurement import (
    latent_metrics,
    mismatch_metrics,
    quantization_metrics,
    rule_metrics,
    useful_metrics,
)
from areal_jax.learning.packed_rows import PADDING
from areal_jax.learning.passes import StepResult, Trained
from areal_jax.telemetry import names
from areal_jax.types import PackedBatch
from tests.learning.test_meshes import make_learner, update_once
from tests.models.family_examples import CONFIGS, draw


def batch(positions, trajectories, versions=None):
    """Loss token n is predicted at positions[n] of its trajectory; the row has the tokens in their order."""
    shape = (1, 1, len(positions))
    fields = {
        field.name: np.zeros(shape, np.int32)
        for field in dataclasses.fields(PackedBatch)
        if field.name not in ('behavior_logprobs', 'policy_versions', 'trajectory_ids', 'columns')
    }
    return PackedBatch(
        **fields
        | {
            'positions': np.array(positions, np.int32).reshape(shape),
            'sources': np.arange(len(positions), dtype=np.int32).reshape(shape),
        },
        behavior_logprobs=np.zeros(shape, np.float32),
        policy_versions=np.array(versions or [3] * len(positions), np.int32).reshape(shape),
        trajectory_ids=np.array(trajectories, np.int32).reshape(shape),
    )


def test_tokens_behind_those_of_the_environment_are_of_the_next_turn():
    # of trajectory 0 two tokens, three of the environment, one, one of the environment, one; and so on
    positions, trajectories = [4, 5, 9, 11, 2, 8, 9, 7, 0], [0, 0, 0, 0, 1, 1, 1, 2, -1]
    packed = batch(positions, trajectories, versions=[3, 3, 3, 3, 3, 3, 2, 3, 0])
    learned = -np.array([1, 1, 2, 3, 1, 4, 9, 7, 9], np.float32).reshape(1, 1, -1)
    found = mismatch_metrics([packed], [learned], 3)
    assert found['mismatch/n'] == 7
    turns = {name.removeprefix('mismatch/turn/'): value for name, value in found.items() if '/turn/' in name}
    assert turns.pop('1/mean_abs') == pytest.approx((1 + 1 + 1 + 7) / 4)
    assert turns == {'1/n': 4, '2/n': 2, '2/mean_abs': 3, '3/n': 1, '3/mean_abs': 3}


def test_rows_of_one_turn_have_no_metric_of_turns():
    found = mismatch_metrics([batch([3, 4, 3], [0, 0, 1])], [np.zeros((1, 1, 3), np.float32)], 3)
    assert not [name for name in found if '/turn/' in name]


def test_turns_beyond_the_eighth_are_counted_with_it():
    found = mismatch_metrics([batch(range(0, 20, 2), [0] * 10)], [np.ones((1, 1, 10), np.float32)], 3)
    assert (found['mismatch/turn/8/n'], found['mismatch/turn/7/n']) == (3, 1)


def test_useful_tokens_are_trained_with_an_advantage_in_an_applied_step():
    # of four tokens one is masked and one has no advantage; the second batch was left out for a gradient of NaN
    packed = dataclasses.replace(
        batch([3, 4, 5, 6], [0, 0, 1, 1]),
        advantages=np.array([0.5, -2.0, 0.0, 1.0], np.float32).reshape(1, 1, -1),
        loss_mask=np.array([True, True, True, False]).reshape(1, 1, -1),
    )
    assert useful_metrics([packed, packed], [True, False]) == {'update/useful_tokens': 2.0}
    assert useful_metrics([], []) == {'update/useful_tokens': 0.0}


def batch_of(versions, behavior, ids):
    """A batch of one row with what is read here."""
    fields = dict.fromkeys(PackedBatch.__dataclass_fields__)
    shape = lambda values, dtype: np.array(values, dtype)[None, None]
    fields |= {
        'policy_versions': shape(versions, np.int32),
        'behavior_logprobs': shape(behavior, np.float32),
        'trajectory_ids': shape(ids, np.int32),
    }
    return PackedBatch(**fields)


def test_the_numbers_are_those_of_the_formulas():
    batch = batch_of([4, 4, 3, 4], [-1.0, -2.0, -1.0, -9.0], [0, 0, 1, PADDING])
    learned = np.array([[[-0.5, -2.25, -2.0, 0.0]]], np.float32)
    found = quantization_metrics([batch], [learned], 4)
    a, b = 0.5, -0.25  # tokens of version 4; that of version 3 has -1
    assert found[names.MISMATCH_KL] == pytest.approx((math.exp(a) - 1 - a + math.exp(b) - 1 - b) / 2)
    weights = math.exp(a), math.exp(b)
    assert found[names.MISMATCH_SAMPLE_SIZE] == pytest.approx(sum(weights) ** 2 / (2 * sum(w * w for w in weights)))
    assert found[names.MISMATCH_RATIO_SHARE] == pytest.approx((a * a + b * b) / 2 / ((a * a + b * b + 1) / 3))


def test_equal_policies_lose_no_sample_and_have_no_share():
    batch = batch_of([4, 4], [-1.0, -2.0], [0, 0])
    found = quantization_metrics([batch], [batch.behavior_logprobs], 4)
    assert found == {names.MISMATCH_KL: 0.0, names.MISMATCH_SAMPLE_SIZE: 1.0, names.MISMATCH_RATIO_SHARE: 0.0}


def test_nothing_is_said_of_an_update_without_tokens_of_its_version():
    batch = batch_of([3], [-1.0], [0])
    assert quantization_metrics([batch], [batch.behavior_logprobs], 4) == {}
    assert quantization_metrics([], [], 4) == {}


def test_the_difference_by_the_form_of_the_rule_is_the_mean_over_trained_tokens():
    packed = dataclasses.replace(
        batch(range(4), [0] * 4), loss_mask=np.array([True, False, True, True]).reshape(1, 1, 4)
    )
    result = StepResult({}, [], np.array([-1.0, -9.0, -2.0, -3.0], np.float32).reshape(1, 1, 4))
    tokens = np.array([-1.5, 0.0, -2.0, -2.0], np.float32).reshape(1, 1, 4)
    assert rule_metrics(Trained([result], [], [packed])) == {}
    found = rule_metrics(Trained([result], [], [packed], tokens))
    assert found == {'mismatch/delta_rule': pytest.approx(0.5), 'mismatch/delta_rule_n': 3}


def test_the_difference_by_the_form_of_latent_attention_is_the_mean_over_trained_tokens():
    packed = dataclasses.replace(
        batch(range(4), [0] * 4), loss_mask=np.array([True, False, True, True]).reshape(1, 1, 4)
    )
    difference = np.array([-0.5, 9.0, 0.0, 1.0], np.float32).reshape(1, 1, 4)
    assert latent_metrics(Trained([], [], [packed])) == {}
    found = latent_metrics(Trained([], [], [packed], of_latents=difference))
    assert found == {'mismatch/latent_form': pytest.approx(0.5), 'mismatch/latent_form_n': 3}
    nothing = dataclasses.replace(packed, loss_mask=np.zeros((1, 1, 4), bool))
    assert latent_metrics(Trained([], [], [nothing], of_latents=difference)) == {'mismatch/latent_form_n': 0}


@pytest.mark.parametrize(
    ('dtype', 'least', 'most'), [pytest.param('float32', 0, 1e-5, marks=pytest.mark.slow), ('bfloat16', 1e-3, 0.3)]
)
def test_an_update_measures_the_form_of_latent_attention_in_the_dtype_of_engines(dtype, least, most):
    config = CONFIGS['deepseek_v3']
    changes = {'latent_form': True, 'publish_dtype': dtype}
    metrics, _ = update_once(make_learner(config=config, params=draw(config), changes=changes))
    assert metrics[names.MISMATCH_LATENTS_COUNT] > 10
    assert least < metrics[names.MISMATCH_LATENTS] < most
