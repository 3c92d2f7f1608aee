"""The host's loop does work per trajectory and per segment, never per token: that would hold up every engine."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from areal_jax.types import NOT_GENERATED, Segment
from tests.toys import ToyRun


class Whole(np.ndarray):
    """An array that is copied and measured as a whole: to look at its entries one by one is an error."""

    def _refuse(self, *_):
        raise AssertionError('work per token on the event loop')

    __iter__ = tolist = item = _refuse

    def __getitem__(self, index):
        return super().__getitem__(index) if isinstance(index, slice) else self._refuse()


class LongAnswers:
    """Answers of four segments without an engine and without taking time: text, output of a tool, and both again."""

    def __init__(self, gate, tokens):
        self._gate, self._tokens = gate, tokens

    async def run(self, prompt, episode):
        for version in (self._gate.version, NOT_GENERATED, self._gate.version, NOT_GENERATED):
            tokens, logprobs = (np.ones(self._tokens, dtype).view(Whole) for dtype in (np.int32, np.float32))
            episode.append(Segment(tokens, logprobs, version))
        episode.finish_reason = 'stop'


class BlindLearner:
    """Looks at no token."""

    w = 0  # the weights at the start

    def update(self, groups, version):
        return {}

    def publish(self, version):
        return 0

    save = lambda self: 0


class BlindRun(ToyRun):
    def price_update(self, groups):
        return len(groups)


async def verdict(prompt, answer_tokens, finish_reason, describe_episode):
    from areal_jax.types import Verdict

    return Verdict(float(prompt.draw % 2))


def lines_run(tokens):
    """Lines of areal_jax/control executed on the loop for a run whose segments have `tokens` tokens."""
    run = BlindRun(steps=4, checkpoint_every=2, max_token_age=3, over_age='drop', prices=dict.fromkeys(
        ('decode', 'prefill', 'train', 'publish', 'load', 'snapshot', 'reward', 'save'), 0.01
    ), learner=BlindLearner(), make_workflow=lambda run: LongAnswers(run.gate, tokens))  # fmt: skip
    run.verifier.verify = verdict
    counted = 0

    def trace(frame, event, _):
        nonlocal counted
        if 'areal_jax/control' not in frame.f_code.co_filename:
            return None
        counted += event == 'line'
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run.run()
    finally:
        sys.settrace(before)
    assert [step.step for step in run.steps] == [1, 2, 3, 4]
    assert sum(len(t.answer_tokens) for g in run.groups for t in g.trajectories) == 4 * 3 * 2 * 4 * tokens
    return counted


def test_an_update_costs_the_loop_the_same_for_any_length_of_its_answers():
    # 24 answers of 4 segments of 10_000 tokens are a million in all
    assert lines_run(10_000) == lines_run(1) > 1000


@pytest.mark.parametrize('touch', [list, np.ndarray.sum, lambda a: a[3], lambda a: a.tolist()])
def test_the_array_of_this_test_notices_work_per_token(touch):
    array = np.ones(4, np.int32).view(Whole)
    if touch is np.ndarray.sum:
        assert touch(array) == 4  # one call for all tokens is fine
    else:
        with pytest.raises(AssertionError, match='work per token'):
            touch(array)
