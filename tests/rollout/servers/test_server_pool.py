"""Servers that join, leave, die, hang and return, and the commit of a version; all under the virtual clock."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from areal_jax.rollout import pool
from tests.rollout.scripted import scripted
from tests.rollout.servers.rig import PROBE, PROMPT, ServerRig, request, weights


def check(tokens, *answers):
    """Answers are what one engine would have said: no token is lost, repeated or of another version."""
    for answer in answers:
        assert answer.error is None
        assert len(answer.tokens) == tokens
        assert answer.tokens == [1 + (7 * v + len(PROMPT) + i) % 9 for i, v in enumerate(answer.versions)]
        assert answer.generation.finish_reason == 'length'


# Joining.


@scripted(ServerRig, 1, probe=PROBE, join=False)
async def test_a_server_gets_the_current_version_and_answers_a_probe_before_it_gets_work(rig):
    found = rig.ask(request(0))
    await rig.pass_time(0.5)
    assert not found[0].tokens  # it waits for a server
    rig.pool.join(rig.servers[0], 1, 'toy:0')
    await rig.end_of(found)
    check(8, found[0])
    rig.check_closed()
    kinds = ['register', 'engine_state', 'stage', 'load', 'probe', 'join', 'route']
    order = [e['kind'] for e in rig.log.events if e['kind'] in kinds]
    assert order == [
        'register', 'engine_state', 'stage', 'stage', 'stage', 'load', 'engine_state', 'probe', 'join', 'engine_state',
        'route',
    ]  # fmt: skip
    assert [e['phase'] for e in rig.kinds('stage')] == ['stage', 'swap', 'acknowledge']
    assert [state for state, _ in rig.reasons('engine/0')] == ['syncing', 'probing', 'serving']


@scripted(ServerRig, 2, join=False)
async def test_a_run_can_wait_until_so_many_engines_serve_but_not_for_ever(rig):
    stop, clock = rig.clock.event('stop'), rig.clock
    assert await rig.pool.await_serving(0, 5.0, stop) == 0
    rig.pool.join(rig.servers[0], 1, 'toy:0')
    assert await rig.pool.await_serving(1, 5.0, stop) == 1
    began = clock.now()
    assert await rig.pool.await_serving(2, 5.0, stop) == 1
    assert clock.now() - began == pytest.approx(5.0)
    assert await rig.pool.await_serving(2, 5.0, stop, patience_s=1.0) == 1
    assert 6.0 <= clock.now() - began <= 6.2
    began = clock.now() - 5.0
    stop.set()
    assert await rig.pool.await_serving(2, 5.0, stop) == 1
    assert clock.now() - began == pytest.approx(5.0)


def test_a_server_whose_logprobs_are_not_the_learners_gets_no_work_until_they_are():
    async def score(version, prompt, tokens):
        assert (version, prompt.tolist(), len(tokens)) == (0, PROMPT.tolist(), 4)
        asked.append(version)
        return None if len(asked) == 1 else np.full(4, -1.5 if len(asked) < 4 else -1.0, np.float32)

    async def script(rig):
        found = rig.ask(request(0))
        rig.pool.join(rig.servers[0], 1, 'toy:0')
        await rig.until(lambda: rig.pool.states() == {'engine/0': 'quarantined'})
        assert not found[0].tokens
        await rig.end_of(found)
        check(8, found[0])

    asked = []
    rig = ServerRig(1, probe=PROBE, score=score, join=False)
    rig.run(script)
    assert [e['outcome'] for e in rig.kinds('probe')] == ['undecided', 'failed', 'failed', 'passed']
    said = "its log-probs differ from the learner's by 0.5 at most and 0.5 on average, allowed are 0.001 and 0.001"
    assert said in rig.reasons('engine/0')[2][1]


def test_a_probe_that_the_learner_cannot_judge_is_repeated_with_the_next_version():
    async def score(version, prompt, tokens):
        return None if version == 0 else -np.ones(len(tokens), np.float32)

    async def script(rig):
        rig.pool.join(rig.servers[0], 1, 'toy:0')
        await rig.until(lambda: rig.kinds('probe'))
        await rig.pass_time(2.0)
        rig.load(1)
        await rig.until(lambda: rig.pool.states() == {'engine/0': 'serving'}, seconds=0.5)

    rig = ServerRig(1, probe=PROBE, score=score, join=False)
    rig.run(script)
    assert [(e['version'], e['outcome']) for e in rig.kinds('probe')] == [(0, 'undecided'), (1, 'passed')]


def test_a_server_whose_logprobs_are_a_little_off_on_average_gets_no_work():
    async def score(version, prompt, tokens):
        return np.full(len(tokens), -1.0008, np.float32)

    async def script(rig):
        rig.pool.join(rig.servers[0], 1, 'toy:0')
        await rig.until(lambda: rig.pool.states() == {'engine/0': 'quarantined'})

    probe = dataclasses.replace(PROBE, max_mean=5e-4)
    ServerRig(1, probe=probe, score=score, join=False).run(script)


@pytest.mark.parametrize('trouble', ['garbage', 'other version', 'fails requests'])
@scripted(ServerRig, 2, probe=PROBE, join=False)
async def test_a_server_that_answers_the_probe_with_garbage_gets_no_work(rig, trouble):
    rig.servers[0].trouble = {trouble}
    rig.pool.join(rig.servers[0], 1, 'toy:0')
    rig.pool.join(rig.servers[1], 1, 'toy:1')
    await rig.pass_time(3.0)
    answers = rig.ask(*(request(draw) for draw in range(4)))
    await rig.end_of(answers)
    assert {answer.generation.engine for answer in answers} == {'engine/1'}
    assert rig.pool.states()['engine/0'] != 'serving'
    rig.servers[0].heal()
    await rig.until(lambda: rig.pool.states()['engine/0'] == 'serving')


def test_a_server_that_lacks_what_the_run_needs_is_refused_by_name():
    rig = ServerRig(1, requirements=[pool.needs_spans('learning')])
    rig.servers[0].capabilities = dataclasses.replace(rig.servers[0].capabilities, spans=False)
    with pytest.raises(pool.EngineError, match=r'^engine/0 cannot tell the version'):
        rig.run(None)


@scripted(ServerRig, 2)
async def test_a_later_incarnation_replaces_an_earlier_one_and_an_earlier_one_is_ignored(rig):
    answers = rig.ask(*(request(draw, tokens=40) for draw in range(2)))
    await rig.pass_time(0.1)
    rig.pool.join(rig.servers[0], 1, 'toy:0')  # known
    assert len(rig.kinds('register')) == 2
    rig.servers[0].restart()
    rig.pool.join(rig.servers[0], 2, 'toy:0')
    rig.pool.join(rig.servers[0], 1, 'toy:0')  # an entry of the dead one
    await rig.end_of(answers)
    check(40, *answers)
    assert rig.pool.states() == {'engine/0': 'serving', 'engine/1': 'serving'}
    rig.check_closed()
    assert [(e['engine'], e['incarnation']) for e in rig.kinds('register')] == [
        ('engine/0', 1), ('engine/1', 1), ('engine/0', 2),
    ]  # fmt: skip
    assert [(e['engine'], e['reason']) for e in rig.kinds('leave')] == [
        ('engine/0', 'it was started again (incarnation 2)')
    ]
    assert rig.servers[0].closed  # by the client of the first incarnation


# Death.


@scripted(ServerRig, 2)
async def test_a_dead_server_loses_nothing_that_was_received(rig):
    answers = rig.ask(*(request(draw, sample, tokens=30) for draw in range(4) for sample in range(2)))
    await rig.pass_time(0.3)
    kept = {id(one): list(one.tokens) for one in answers}
    assert any(kept.values())
    rig.servers[0].die()
    await rig.end_of(answers)
    for answer in answers:
        check(30, answer)
        assert answer.tokens[: len(kept[id(answer)])] == kept[id(answer)]
        assert answer.generation.engine == 'engine/1'
    assert rig.pool.states()['engine/0'] != 'serving'
    rig.check_closed()
    attempts = [answer.generation.attempts for answer in answers]
    moves = rig.kinds('move')
    assert sorted(attempts) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [e['from_engine'] for e in moves] == ['engine/0'] * 4
    assert sum(e['tokens'] for e in moves) > 0


@scripted(ServerRig, 2, max_retries=2)
async def test_a_request_that_too_many_engines_give_up_is_lost_with_a_reason(rig):
    for server in rig.servers:
        server.trouble = {'fails requests'}
    (answer,) = rig.ask(request(0))
    await rig.end_of([answer])
    rig.check_closed()
    assert 'request 0/0/0 was given up by 3 engines (rollout.max_retries=2), the last, engine/' in str(answer.error)
    engines = [e['from_engine'] for e in rig.kinds('move')]
    assert engines == ['engine/0', 'engine/1', 'engine/0']  # never the same twice in a row


def out_of_service(rig):
    return [(e['engine'], e['state']) for e in rig.kinds('engine_state') if e['state'] in ('unknown', 'quarantined')]


@scripted(ServerRig, 2)
async def test_a_lost_connection_is_one_failure_however_many_requests_it_carried(rig):
    answers = rig.ask(*(request(draw, sample, tokens=40) for draw in range(4) for sample in range(4)))
    await rig.pass_time(0.1)
    rig.servers[0].cut()
    await rig.end_of(answers)
    check(40, *answers)
    assert sorted(answer.generation.attempts for answer in answers) == [0] * 8 + [1] * 8
    later = rig.ask(*(request(draw) for draw in range(20, 24)))
    await rig.end_of(later)
    assert {answer.generation.engine for answer in later} == {'engine/0', 'engine/1'}
    assert out_of_service(rig) == []


@scripted(ServerRig, 2, probe=PROBE)
async def test_a_server_that_fails_requests_and_says_that_it_is_well_is_taken_out(rig):
    rig.servers[0].trouble = {'fails requests'}
    for draw in range(40):
        answers = rig.ask(*(request(2 * draw + i, tokens=4) for i in range(2)))
        await rig.end_of(answers)
        await rig.pass_time(0.05)
    assert rig.pool.states()['engine/0'] != 'serving'
    assert out_of_service(rig)[0] == ('engine/0', 'unknown')
    said = 'requests failed 3 times, and it said each time that it is well; the last: engine/0: status 500'
    assert said in [reason for _, reason in rig.reasons('engine/0')]


@scripted(ServerRig, 1)
async def test_with_one_server_a_failed_request_waits_until_it_is_known_to_be_well(rig):
    server = rig.servers[0]
    server.trouble = {'fails requests'}
    (answer,) = rig.ask(request(0))
    await rig.until(lambda: rig.kinds('move'))
    server.heal()
    asked = server.calls.count('ask')
    await rig.end_of([answer])
    assert server.calls.count('ask') > asked - 1
    check(8, answer)


@scripted(ServerRig, 2)
async def test_an_answer_whose_end_was_lost_is_not_generated_again(rig):
    """All tokens came, and the connection was cut before the reason."""
    (answer,) = rig.ask(request(0, tokens=3))
    server = next(one for one in rig.servers if one.generations)
    emit = server.emit

    def lose_the_end(generation, version, w):
        emit(generation, version, w)
        generation.finish_reason = None

    server.emit = lose_the_end
    await rig.until(lambda: len(answer.tokens) == 3)
    rig.pool.suspect(server.name, 'it is silent')
    await rig.end_of([answer])
    check(3, answer)
    assert rig.kinds('move') == []


@scripted(ServerRig, 2, probe=PROBE)
async def test_a_dead_server_that_returns_is_brought_to_the_newest_version_before_it_works(rig):
    rig.servers[0].die()
    await rig.until(lambda: rig.pool.states()['engine/0'] == 'unknown')
    done = rig.load(1)
    await rig.until(lambda: done)
    rig.servers[0].restart()
    await rig.until(lambda: rig.pool.states()['engine/0'] == 'serving')
    assert rig.servers[0].version == 1
    answers = rig.ask(*(request(draw) for draw in range(4)))
    await rig.end_of(answers)
    assert {answer.generation.engine for answer in answers} == {'engine/0', 'engine/1'}
    assert all(answer.versions == [1] * 8 for answer in answers)
    states = [state for state, _ in rig.reasons('engine/0')]
    assert states == ['syncing', 'probing', 'serving', 'unknown', 'syncing', 'probing', 'serving']


# Hanging.


@scripted(ServerRig, 2)
async def test_a_server_that_hangs_is_found_out_fenced_and_used_again(rig):
    answers = rig.ask(*(request(draw, tokens=60) for draw in range(2)))
    await rig.pass_time(0.2)
    rig.servers[0].trouble = {'hangs'}  # SIGSTOP: connections stay open, nothing answers
    hung_s = rig.clock.now()
    await rig.until(lambda: rig.pool.states()['engine/0'] == 'unknown')
    assert rig.clock.now() - hung_s < 5.0
    await rig.end_of(answers)
    for answer in answers:
        check(60, answer)
        assert answer.generation.engine == 'engine/1'
    assert rig.servers[0].fenced == 1  # when it joined
    rig.servers[0].heal()  # it goes on with what it had
    await rig.until(lambda: rig.pool.states()['engine/0'] == 'serving')
    assert rig.servers[0].fenced == 2
    (late,) = rig.ask(request(9))
    await rig.end_of([late])
    check(8, late)
    rig.check_closed()
    assert [e['engine'] for e in rig.kinds('fence')] == ['engine/0', 'engine/1', 'engine/0']


@scripted(ServerRig, 2)
async def test_a_silent_server_is_suspected_at_once(rig):
    answers = rig.ask(*(request(draw, tokens=60) for draw in range(2)))
    await rig.pass_time(0.2)
    rig.servers[0].trouble = {'hangs'}
    rig.pool.suspect('engine/0', 'no heartbeat for 3 s')
    rig.pool.suspect('engine/7', 'not there')
    assert rig.pool.states()['engine/0'] == 'unknown'
    await rig.end_of(answers)
    check(60, *answers)
    assert rig.reasons('engine/0')[-1] == ('unknown', 'no heartbeat for 3 s')


@scripted(ServerRig, 2)
async def test_a_pause_does_not_wait_for_a_server_that_hangs(rig):
    answers = rig.ask(*(request(draw, tokens=60) for draw in range(2)))
    await rig.pass_time(0.2)
    rig.servers[0].trouble = {'hangs'}
    began_s = rig.clock.now()
    await rig.pool.pause()
    assert rig.clock.now() - began_s < 5.0
    await rig.pass_time(0.001)
    before = [list(answer.tokens) for answer in answers]
    order = rig.pool.order()
    await rig.pass_time(1.0)
    assert [answer.tokens for answer in answers] == before
    (asked_meanwhile,) = rig.ask(request(5))
    assert not asked_meanwhile.tokens
    rig.pool.resume()
    await rig.end_of([*answers, asked_meanwhile])
    check(60, *answers)
    assert order == [('engine/1', 1, 0), ('', 0, 0)]


# Leaving.


@scripted(ServerRig, 2)
async def test_a_server_that_leaves_finishes_what_it_has_and_gets_nothing_new(rig):
    answers = rig.ask(*(request(draw, tokens=20) for draw in range(2)))
    await rig.pass_time(0.05)
    rig.pool.leave('engine/0', 'SIGTERM')
    rig.pool.leave('engine/0', 'SIGTERM')
    later = rig.ask(*(request(draw, tokens=5) for draw in (2, 3)), request(0, sample=1))
    assert {answer.generation.engine for answer in later} == {'engine/1'}
    await rig.end_of([*answers, *later])
    await rig.until(lambda: rig.pool.states() == {'engine/1': 'serving'})
    check(20, answers[0])
    assert answers[0].generation.engine == 'engine/0'
    rig.check_closed()
    assert rig.kinds('move') == []
    assert [(e['engine'], e['reason']) for e in rig.kinds('leave')] == [('engine/0', 'it left')]


@scripted(ServerRig, 2)
async def test_what_a_leaving_server_does_not_finish_in_time_moves_and_is_no_failure(rig):
    answers = rig.ask(request(0, tokens=200), request(1, tokens=5))
    await rig.pass_time(0.05)
    rig.pool.leave('engine/0', 'SIGTERM')
    await rig.end_of(answers)
    check(200, answers[0])
    assert (answers[0].generation.attempts, answers[0].generation.engine) == (0, 'engine/1')
    assert rig.pool.states() == {'engine/1': 'serving'}
    assert [e['attempt'] for e in rig.kinds('move')] == [0]


@scripted(ServerRig, 2)
async def test_a_run_without_a_server_says_so_after_a_while(rig):
    answers = rig.ask(request(0))
    for server in rig.servers:
        server.die()
    await rig.pass_time(10.0)
    assert rig.no_server == []
    await rig.pass_time(15.0)
    assert not answers[0].ended
    assert rig.no_server == [
        'no server has served for 20 s (run.stall_timeout_s): engine/0 is unknown (engine/0: ask: connection refused), '
        'engine/1 is unknown (engine/1: ask: connection refused); see their logs'
    ]


# The commit of a version.


@scripted(ServerRig, 2)
async def test_a_version_is_staged_while_decoding_goes_on_swapped_and_acknowledged(rig):
    answers = rig.ask(*(request(draw, tokens=60) for draw in range(2)))
    await rig.pass_time(0.2)
    done = rig.load(1)
    await rig.until(lambda: done)
    assert [server.version for server in rig.servers] == [1, 1]
    await rig.end_of(answers)
    for answer in answers:
        check(60, answer)
        assert answer.versions == sorted(answer.versions)
        assert set(answer.versions) == {0, 1}
    assert done == [0.01]
    phases = [(e['phase'], e['outcome']) for e in rig.kinds('stage') if e['version'] == 1 and e['engine'] == 'engine/1']
    assert phases == [('stage', 'done'), ('swap', 'done'), ('acknowledge', 'done')]
    assert [(e['engine'], e['version']) for e in rig.kinds('load')][2:] == [('engine/0', 1), ('engine/1', 1)]


@scripted(ServerRig, 2)
async def test_tokens_of_a_version_that_is_swapped_in_and_not_acknowledged_yet_are_right(rig):
    answers = rig.ask(*(request(draw, tokens=60) for draw in range(2)))
    await rig.pass_time(0.1)
    for server in rig.servers:
        server.ask_s = 0.1  # ten tokens come before the acknowledgement
    done = rig.load(1)
    await rig.until(lambda: done)
    await rig.end_of(answers)
    for answer in answers:
        check(60, answer)
        assert set(answer.versions) == {0, 1}
    assert (out_of_service(rig), rig.kinds('move')) == ([], [])


@scripted(ServerRig, 1)
async def test_a_version_that_is_published_during_a_health_check_is_no_contradiction(rig):
    server = rig.servers[0]
    server.ask_s = 0.3
    asked = server.calls.count('ask')
    await rig.until(lambda: server.calls.count('ask') > asked)
    done = rig.load(1)
    await rig.until(lambda: done)
    assert out_of_service(rig) == []


@scripted(ServerRig, 2)
async def test_a_server_that_refuses_a_version_serves_on_within_the_bound_and_is_asked_again(rig):
    (answer,) = rig.ask(request(0, tokens=400))
    assert answer.generation.engine == 'engine/0'
    rig.servers[0].trouble = {'torn'}
    done = rig.load(1)
    await rig.until(lambda: done)
    assert rig.pool.states()['engine/0'] == 'serving'  # one version behind
    done = rig.load(2)
    await rig.until(lambda: done)
    assert rig.pool.states()['engine/0'] == 'syncing'  # two
    assert [server.version for server in rig.servers] == [0, 2]
    assert answer.generation.engine == 'engine/1'
    assert rig.servers[0].generations == {}
    rig.servers[0].heal()
    await rig.until(lambda: rig.pool.states()['engine/0'] == 'serving')
    assert rig.servers[0].version == 2
    await rig.end_of([answer])
    check(400, answer)
    assert answer.generation.attempts == 0
    assert (
        'it is 2 versions behind: engine/0: the digest of a leaf is wrong' in dict(rig.reasons('engine/0'))['syncing']
    )


@pytest.mark.parametrize(
    ('trouble', 'phase'),
    [('stage hangs', 'stage'), ('swap lost', 'swap'), ('acts, then hangs', 'swap'), ('ask hangs', 'acknowledge')],
)
@scripted(ServerRig, 2)
async def test_after_an_unknown_outcome_the_server_is_asked_and_gets_no_requests_until_it_answers(rig, trouble, phase):
    is_silent = trouble in ('acts, then hangs', 'ask hangs')
    answers = rig.ask(*(request(draw, tokens=100) for draw in range(2)))
    await rig.pass_time(0.2)
    server = rig.servers[0]
    server.trouble = {trouble}
    done = rig.load(1)
    await rig.until(lambda: done)  # it does not wait for ever
    assert rig.pool.states()['engine/0'] != 'serving'
    calls = len(server.calls)
    await rig.end_of(answers)
    check(100, *answers)
    if is_silent:
        await rig.pass_time(2.0)
        assert set(server.calls[calls:]) == {'ask'}
        assert rig.pool.states()['engine/0'] == 'unknown'
        assert rig.pool.pinned_versions() == (1,)  # it may still be reading it
    server.heal()
    await rig.until(lambda: rig.pool.states()['engine/0'] == 'serving')
    assert (server.version, rig.pool.pinned_versions()) == (1, ())
    rig.check_closed()
    outcomes = [e['phase'] for e in rig.kinds('stage') if e['outcome'] == 'unknown']
    assert set(outcomes) == {phase}
    swaps = [e for e in rig.kinds('stage') if (e['engine'], e['phase'], e['version']) == ('engine/0', 'swap', 1)]
    assert sum(e['outcome'] == 'done' for e in swaps) <= 1
    if is_silent:  # it has done it, and is not asked for it again
        assert len(swaps) == 1


@pytest.mark.parametrize('trouble', ['stale digest', 'stale version'])
@scripted(ServerRig, 2, probe=PROBE)
async def test_a_server_that_does_not_hold_what_it_was_given_is_taken_out(rig, trouble):
    rig.servers[0].trouble = {trouble}
    done = rig.load(1)
    await rig.until(lambda: done)
    assert rig.pool.states()['engine/0'] != 'serving'
    await rig.pass_time(3.0)
    assert 'serving' not in [state for state, _ in rig.reasons('engine/0')][3:]
    rig.servers[0].heal()
    await rig.until(lambda: rig.pool.states()['engine/0'] == 'serving')
    assert 'it was given version 1 (digest 1) and says that it holds' in dict(rig.reasons('engine/0'))['quarantined']


@pytest.mark.parametrize('trouble', ['garbage', 'other version'])
@scripted(ServerRig, 2, probe=PROBE)
async def test_a_server_that_delivers_what_cannot_be_is_taken_out_and_its_requests_move(rig, trouble):
    answers = rig.ask(*(request(draw, tokens=30) for draw in range(4)))
    await rig.pass_time(0.1)
    rig.servers[0].trouble = {trouble}
    await rig.until(lambda: rig.pool.states()['engine/0'] == 'quarantined')
    await rig.end_of(answers)
    check(30, *answers)
    reason = 'the log-prob nan' if trouble == 'garbage' else 'tokens of version 5, and it was given 0 to 0'
    assert reason in dict(rig.reasons('engine/0'))['quarantined']


@pytest.mark.parametrize('end', ['die', 'hang'])
@pytest.mark.parametrize('at_s', [0.0, 0.0005, 0.004, 0.0065, 0.0075, 0.02])
@scripted(ServerRig, 2)
async def test_a_server_may_die_or_hang_in_each_part_of_a_commit(rig, end, at_s):
    answers = rig.ask(*(request(draw, tokens=50) for draw in range(4)))
    await rig.pass_time(0.1)
    done = rig.load(1)
    await rig.pass_time(at_s)
    if end == 'die':
        rig.servers[0].die()
    else:
        rig.servers[0].trouble = {'hangs'}
    await rig.until(lambda: done)
    await rig.end_of(answers)
    check(50, *answers)
    rig.check_closed()
    rig.servers[0].restart()
    await rig.until(lambda: rig.pool.states() == {'engine/0': 'serving', 'engine/1': 'serving'})
    assert [server.version for server in rig.servers] == [1, 1]


# Routing.


def test_requests_go_where_they_end_soonest():
    async def script(rig):
        answers = []
        for wave in range(30):
            answers += rig.ask(*(request(10 * wave + draw, tokens=10) for draw in range(4)))
            await rig.pass_time(0.4)
        await rig.end_of(answers)
        late = [answer.generation.engine for answer in answers[60:]]
        return late.count('engine/0'), late.count('engine/1')

    slow, fast = ServerRig(2, step_s=(0.04, 0.01)).run(script)
    assert fast > 1.4 * slow  # the first is four times slower
    even = ServerRig(2).run(script)
    assert 0.8 < even[0] / even[1] < 1.25


@scripted(ServerRig, 2)
async def test_cancelled_requests_end_at_once_wherever_they_are(rig):
    placed = rig.ask(*(request(draw, tokens=50) for draw in range(3)))
    await rig.pass_time(0.1)
    rig.servers[0].trouble = {'hangs'}
    await rig.pool.pause()
    waiting = rig.ask(request(7))
    rig.pool.cancel_all()
    await rig.pass_time(0.001)
    assert all(one.ended and one.generation.finish_reason == 'cancelled' for one in (*placed, *waiting))
    rig.check_closed()
    assert rig.pool.order() == []


def test_the_same_faults_give_the_same_events():
    async def script(rig):
        answers = rig.ask(*(request(draw, tokens=30) for draw in range(6)))
        await rig.pass_time(0.15)
        rig.servers[1].die()
        rig.load(1)
        await rig.pass_time(0.5)
        rig.servers[1].restart()
        await rig.end_of(answers)
        return rig.log.events

    assert ServerRig(3).run(script) == ServerRig(3).run(script)


@scripted(ServerRig, 1)
async def test_servers_keep_no_earlier_versions(rig):
    with pytest.raises(RuntimeError, match='keep no earlier versions'):
        rig.pool.generate(dataclasses.replace(request(0), version=1))
    with pytest.raises(RuntimeError, match='keep no earlier versions'):
        await rig.pool.pin(weights(1))
    rig.ask(request(1))
    with pytest.raises(RuntimeError, match='request 0/1/0 is open already'):
        rig.pool.generate(request(1))
