"""An engine whose log-probs drift from the learner's is named."""

from __future__ import annotations

import math

from areal_jax.rollout.servers.keeper import MismatchWatch


def test_an_engine_that_differs_over_500_tokens_is_taken_out_and_named():
    out = []
    watch = MismatchWatch(1e-3, lambda engine, reason: out.append((engine, reason)))
    for _ in range(10):
        watch.note('engine/0', 100, 0.9e-3)
        watch.note('engine/2', 0, math.nan)
    assert out == []
    watch.note('engine/1', 499, 0.5)  # too few
    assert out == []
    watch.note('engine/1', 501, 0.1)
    ((engine, reason),) = out
    assert engine == 'engine/1'
    assert reason == (
        "its log-probs differ from the learner's by 0.3 on average over 1000 tokens (rollout.max_mismatch=0.001)"
    )


def test_every_window_stands_for_itself_and_nan_is_a_difference():
    out = []
    watch = MismatchWatch(1e-3, lambda engine, reason: out.append(engine))
    watch.note('engine/0', 100_000, 0.0)
    watch.note('engine/0', 500, 0.01)  # not hidden by what was right before
    watch.note('engine/1', 500, math.nan)
    assert out == ['engine/0', 'engine/1']


def test_the_metrics_of_an_update_name_the_engine():
    out = []
    watch = MismatchWatch(1e-3, lambda engine, reason: out.append(engine))
    watch.note_update({
        'mismatch/n': 1000.0, 'mismatch/mean_abs': 0.25,
        'mismatch/of/engine/0/n': 500.0, 'mismatch/of/engine/0/mean_abs': 1e-6,
        'mismatch/of/engine/1/n': 500.0, 'mismatch/of/engine/1/mean_abs': 0.5,
    })  # fmt: skip
    assert out == ['engine/1']
