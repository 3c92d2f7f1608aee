"""What metrics.jsonl says of every update: ages of the trained tokens, every name declared, no work per token."""

from __future__ import annotations

import pytest

from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import read_metrics
from areal_jax.telemetry.names import is_declared
from tests.app.small import SmallRun


def ages_trained(run, step, oldest=None):
    """Ages of the tokens of the groups with a signal, counted token by token: [of age 0, of age 1, ...]."""
    counts = []
    for trajectory in (t for g in run.batches[step - 1] for t in g.trajectories if has_signal(g)):
        for version in trajectory.policy_versions.tolist():
            age = step - 1 - version
            if version >= 0 and (oldest is None or age <= oldest):
                counts += [0] * (age + 1 - len(counts))
                counts[age] += 1
    return counts


def has_signal(group):
    return len({t.reward for t in group.trajectories}) > 1


MASK = {'staleness__max_token_age': 0, 'staleness__over_age': 'mask'}
DROP = {'staleness__max_token_age': 1, 'staleness__over_age': 'drop'}


@pytest.mark.parametrize(
    ('fields', 'oldest'),
    [
        ({}, None),
        (MASK, 0),
        pytest.param(DROP, 1, marks=pytest.mark.slow),
        pytest.param({'staleness__schedule': 'fixed(2)'}, None, marks=pytest.mark.slow),
    ],
    ids=['natural', 'mask', 'drop', 'lock-step'],
)
def test_token_ages_are_those_of_the_trained_tokens(tmp_path, fields, oldest):
    run = SmallRun(tmp_path, run__steps=6, **fields).train()
    lines = read_metrics(run.workdir / 'metrics.jsonl')
    assert len(lines) == 6
    for line in lines:
        histogram = line[names.TOKEN_AGE_HISTOGRAM]
        assert sum(histogram) == line['update/trained_tokens'] == line[names.TOKENS_TRAINED]
        assert histogram == ages_trained(run, line['step'], oldest)
        if histogram:
            assert line[names.TOKEN_AGE_MAX] == len(histogram) - 1
        if oldest is not None:
            assert len(histogram) <= oldest + 1
    assert sum(line['update/filtered_equal_rewards'] for line in lines) > 0 or fields
    if fields is MASK:
        assert sum(line[names.TOKENS_MASKED] for line in lines) > 0


def test_every_metric_is_declared(tmp_path):
    run = SmallRun(tmp_path, run__steps=3, rollout__max_running_groups=1).train()
    undeclared = {
        name for line in read_metrics(run.workdir / 'metrics.jsonl') for name in line if not is_declared(name)
    }
    assert undeclared == set()
