"""Servers that others have paused, that obey the run no longer or drift from the learner, and the end of a run."""

from __future__ import annotations

import math

import pytest

from areal_jax.rollout.servers.keeper import MismatchWatch
from tests.rollout.scripted import scripted
from tests.rollout.servers.rig import PROBE, ServerRig, request
from tests.rollout.servers.test_server_pool import check


@scripted(ServerRig, 1, probe=PROBE, join=False)
async def test_a_server_that_an_earlier_run_left_paused_is_fenced_first_and_serves_at_once(rig):
    server = rig.servers[0]
    await server.pause()  # of the run that was killed
    server.version, server.w, server.digest = 0, 0, 'digest 0'  # that run had the same weights there
    rig.pool.join(server, 1, 'toy:0')
    await rig.until(lambda: rig.pool.states() == {'engine/0': 'serving'}, seconds=0.5)
    (answer,) = rig.ask(request(0))
    await rig.end_of([answer], seconds=0.5)
    check(8, answer)
    assert server.calls[:4] == ['pause', 'fence', 'ask', 'stage']  # nothing is trusted of what is there
    assert [state for state, _ in rig.reasons('engine/0')] == ['syncing', 'probing', 'serving']


@pytest.mark.parametrize('hangs', [True, False])
@scripted(ServerRig, 1, join=False)
async def test_a_new_server_that_cannot_be_fenced_gets_no_work(rig, hangs):
    rig.servers[0].trouble = {'hangs' if hangs else 'fence refused'}
    rig.pool.join(rig.servers[0], 1, 'toy:0')
    await rig.pass_time(3.0)
    assert rig.pool.states() == {'engine/0': 'unknown'}
    assert 'stage' not in rig.servers[0].calls
    rig.servers[0].heal()
    await rig.until(lambda: rig.pool.states() == {'engine/0': 'serving'})


@pytest.mark.parametrize('finds_out', ['swap', 'pause', 'health check'])
@scripted(ServerRig, 2)
async def test_a_server_that_obeys_the_run_no_longer_is_fenced_and_gets_its_weights_again(rig, finds_out):
    answers = rig.ask(*(request(draw, tokens=100) for draw in range(2)))
    await rig.pass_time(0.2)
    server = rig.servers[0]
    server.calls.clear()
    server.trouble = {'obeys another'}
    done = rig.load(1) if finds_out == 'swap' else None
    if finds_out == 'pause':
        await rig.pool.pause()
        assert rig.pool.states()['engine/0'] == 'unknown'
        rig.pool.resume()
    await rig.until(lambda: server.fenced == 2)
    await rig.until(lambda: rig.pool.states()['engine/0'] == 'serving' and (done is None or done))
    await rig.end_of(answers)
    check(100, *answers)
    rig.check_closed()
    calls = server.calls
    assert calls[calls.index('fence') + 1 :][:3] == ['stage', 'swap', 'ask']
    why = dict(rig.reasons('engine/0'))['unknown']
    assert ('obeys this run no longer' in why) == (finds_out == 'health check')
    assert ('its lease has lapsed' in why) == (finds_out != 'health check')


@scripted(ServerRig, 2)
async def test_a_run_says_who_else_has_paused_a_server_and_ends_that_pause_not(rig):
    answers = rig.ask(*(request(draw, tokens=100) for draw in range(2)))
    await rig.pass_time(0.2)
    rig.servers[0].trouble = {'paused by a stranger'}
    await rig.until(lambda: rig.pool.states()['engine/0'] == 'unknown')
    await rig.end_of(answers)
    check(100, *answers)
    assert rig.warnings == ['engine/0 (toy:engine/0): it is paused for 3 s by a stranger']
    rig.servers[1].die()
    await rig.pass_time(25.0)
    assert rig.servers[0].fenced == 1  # when it joined
    rig.servers[0].heal()
    await rig.until(lambda: rig.pool.states()['engine/0'] == 'serving')
    assert len(rig.warnings) == 1
    assert rig.no_server == [
        'no server has served for 20 s (run.stall_timeout_s): engine/0 is unknown (it is paused for 3 s by a '
        'stranger), engine/1 is unknown (engine/1: ask: connection refused); see their logs'
    ]


@pytest.mark.parametrize('trouble', ['', 'dead', 'hangs'])
@scripted(ServerRig, 2)
async def test_the_end_of_a_run_ends_its_pauses_and_waits_for_no_server_that_does_not_answer(rig, trouble):
    rig.ask(*(request(draw, tokens=100) for draw in range(2)))
    await rig.pass_time(0.2)
    await rig.pool.pause()
    rig.servers[0].trouble = {trouble} - {''}
    began_s = rig.clock.now()
    await rig.pool.close()
    assert rig.clock.now() - began_s < (5.1 if trouble == 'hangs' else 0.1)
    assert [server.closed for server in rig.servers] == [not trouble, True]
    assert not any(server.is_paused for server in rig.servers if server.closed)


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
