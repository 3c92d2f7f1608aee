"""rollout.answer_lengths: real engines under the virtual clock, where work takes its price and so ratios are exact."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest

from areal_jax.app.parts.workflow_builder import build_training_workflow, warn_of_lengths
from areal_jax.config.drawn_lengths import AnswerLimits
from areal_jax.control.episode import Episode, Row
from areal_jax.main_check_log import main as check_log
from areal_jax.rollout.workflow import SingleTurn
from areal_jax.types import Prompt, SamplingParams, Segment
from tests.app.small import SmallRun, require_same, resume_at

DRAWN = {'rollout__answer_lengths': 'lognormal(3.5, 0.75)'}
SAMPLING = SamplingParams(8, 1.0, 0, 1.0, ())
# 12 answers an update on 6 slots; decoding alone takes time, since the clock would let training run beside it
FIELDS = {
    'run__steps': 6, 'run__seed': 3, 'rollout__ignore_eos': True, 'rollout__decode_steps': 1,
    'rollout__max_running_groups': 0, 'learner__groups_per_update': 3, 'learner__filter_equal_rewards': False,
    'buffer__capacity': 64, 'checkpoint__every': 2, 'checkpoint__keep': 3,
    **{f'virtual__{name}_s': 0.0 for name in ('prefill_token', 'train_token', 'publish', 'reward')},
}  # fmt: skip


def limit_of(draw, sample):
    return AnswerLimits.parse(DRAWN['rollout__answer_lengths'], 8, FIELDS['run__seed']).of(draw, sample)


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """Both schedules of one config."""
    return {
        eta: SmallRun(tmp_path_factory.mktemp('run'), **FIELDS, **DRAWN, staleness__eta=eta).train()
        for eta in (0.0, 2.0)
    }


def finished(run):
    """Tokens by (draw, sample) of every answer."""
    return {(e['draw'], e['sample']): e['tokens'] for e in run.events if e['kind'] == 'finish'}


def rate(run):
    """Trained tokens a second of the virtual clock, to the last publication."""
    trained = {draw for e in run.events if e['kind'] == 'consume' for draw in e['draws']}
    tokens = sum(tokens for (draw, _), tokens in finished(run).items() if draw in trained)
    return tokens / max(e['time'] for e in run.events if e['kind'] == 'publish')


def test_both_schedules_draw_the_same_lengths_to_the_token(runs):
    synchronous, asynchronous = finished(runs[0.0]), finished(runs[2.0])
    assert synchronous == asynchronous == {answer: limit_of(*answer) for answer in synchronous}
    assert len(synchronous) == 6 * 3 * 4
    assert runs[2.0].report['interruptions'] > 0 == runs[0.0].report['interruptions']
    assert runs[2.0].report['token_age']['mean'] > 0


def test_the_asynchronous_run_is_faster_where_lengths_differ(runs, tmp_path):
    assert rate(runs[2.0]) > 1.2 * rate(runs[0.0])
    equal = {'rollout__answer_lengths': 'constant(4)'}
    rates = [rate(SmallRun(tmp_path / str(eta), **FIELDS, **equal, staleness__eta=eta).train()) for eta in (0.0, 2.0)]
    assert rates[1] == pytest.approx(rates[0], rel=0.02)


def test_a_resumed_run_draws_the_same_lengths(runs, tmp_path):
    resumed = resume_at(runs[2.0], tmp_path / 'resumed', 2, **FIELDS, **DRAWN, staleness__eta=2.0)
    require_same(resumed.train(), runs[2.0])


def test_the_log_is_checked_against_the_drawn_lengths(runs, tmp_path, capsys):
    assert check_log([str(runs[2.0].workdir)]) == 0
    config = json.loads((runs[2.0].workdir / 'config.json').read_text())
    for text, field in (('lognormal(4, 0.75)', 'rollout.answer_lengths'), ('', 'rollout.max_new_tokens')):
        config['rollout']['answer_lengths'] = text
        (tmp_path / 'config.json').write_text(json.dumps(config))
        (tmp_path / 'events.jsonl').write_bytes((runs[2.0].workdir / 'events.jsonl').read_bytes())
        assert check_log([str(tmp_path)]) == 2
        assert f'at most ({field})' in capsys.readouterr().err


class Pool:
    """Notes each request and answers none."""

    def __init__(self):
        self.requests = []

    def generate(self, request, prefer=None):
        self.requests.append(request)
        return Cancelled()


class Cancelled:
    engine, finish_reason = 'engine/0', 'cancelled'

    def __aiter__(self):
        return self

    async def __anext__(self):
        raise StopAsyncIteration


def test_only_the_limit_of_a_request_differs():
    """So whoever answers it, an engine or a server, needs to know nothing."""
    pool, prompt = Pool(), Prompt(3, np.arange(4, dtype=np.int32), 'toy', {})
    limits = AnswerLimits.parse(DRAWN['rollout__answer_lengths'], 8, seed=3)
    for drawn in (limits, AnswerLimits(8)):
        for part in ([], [Segment(np.zeros(2, np.int32), np.zeros(2, np.float32), 0)]):
            workflow = build_training_workflow(SingleTurn, None, pool, SAMPLING, 3, drawn)
            asyncio.run(workflow.run(prompt, Episode(5, rows=[Row(segments=list(part))])))
    first, continued, plain, _ = pool.requests
    assert first.sampling.max_new_tokens == continued.sampling.max_new_tokens == limit_of(3, 5) < 8
    assert dataclasses.replace(first, sampling=SAMPLING) == plain


def test_a_model_that_is_not_random_is_warned_of(capsys):
    warn_of_lengths('constant(8)')
    assert "rollout.answer_lengths='constant(8)' ends answers at random lengths" in capsys.readouterr().err
