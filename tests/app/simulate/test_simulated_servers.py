"""Simulated servers: the pool of servers drives them, they die and come back, and no token is generated twice."""

from __future__ import annotations

import itertools

import pytest

from areal_jax import main_check_log
from areal_jax.config.drawn_lengths import parse_lengths
from areal_jax.config.fields import ConfigError
from areal_jax.errors import ExitCode, LostPeerError
from areal_jax.telemetry.metrics import read_metrics
from tests.app.simulate.test_simulated_run import read_events, simulate, simulate_both_ways
from tests.app.small import train_until_killed

SERVERS = {'rollout__server': 'own', 'run__steps': 10, 'learner__filter_equal_rewards': False}
DYING = {**SERVERS, 'simulation__failures': 'exponential(15)', 'simulation__restart': 'uniform(2, 6)'}


@pytest.fixture(scope='module')
def dying(tmp_path_factory):
    workdir = tmp_path_factory.mktemp('dying')
    return workdir, simulate(workdir, **DYING).train()


def starts(workdir):
    """(engine, incarnation, time) of each."""
    found = [event for event in read_events(workdir) if event['kind'] == 'register']
    return [(event['engine'], event['incarnation'], event['time']) for event in found]


def drawn_starts(until_s, seed=0):
    up, down = parse_lengths('exponential(15)', 1 << 30), parse_lengths('uniform(2, 6)', 1 << 30)
    found = []
    for index in range(3):
        start_s = 0.0
        for incarnation in itertools.count(1):
            if start_s > until_s:
                break
            found.append((f'engine/{index}', incarnation, start_s))
            start_s += up.draw(seed, index, incarnation, 'up') + down.draw(seed, index, incarnation, 'down')
    return found


def drawn_ends(until_s):
    """(start, seconds since the death before it) of all servers that came back."""
    down = parse_lengths('uniform(2, 6)', 1 << 30)
    return [
        (start_s, down.draw(0, int(engine[-1]), incarnation - 1, 'down'))
        for engine, incarnation, start_s in drawn_starts(until_s + 100)
        if incarnation > 1
    ]


def test_servers_that_live_generate_as_engines_do(tmp_path):
    """Their weights are staged and acknowledged one by one, which is all that differs: a few per cent of the time."""
    for server in ('own', 'in_process'):
        simulate(tmp_path / server, **{**SERVERS, 'rollout__server': server}).train()
        assert main_check_log.main([str(tmp_path / server)]) == ExitCode.FINISHED
    ends = [max(e['time'] for e in read_events(tmp_path / s) if e['kind'] == 'publish') for s in ('own', 'in_process')]
    assert ends[0] == pytest.approx(ends[1], rel=0.1)
    assert {event['phase'] for event in read_events(tmp_path / 'own') if event['kind'] == 'stage'} == {
        'stage', 'swap', 'acknowledge'
    }  # fmt: skip


def test_servers_die_and_start_when_it_was_drawn(dying):
    workdir, report = dying
    end_s = max(event['time'] for event in read_events(workdir))
    assert sorted(starts(workdir)) == sorted(drawn_starts(end_s))
    assert len(starts(workdir)) > 3
    assert main_check_log.main([str(workdir)]) == ExitCode.FINISHED
    assert sum(row['starts'] for row in report['servers']) == len(starts(workdir))
    assert sum(row['tokens'] for row in report['servers']) == sum(
        event['tokens'] for event in read_events(workdir) if event['kind'] == 'decode'
    )


def test_an_answer_goes_on_elsewhere_with_all_its_tokens(dying):
    workdir, _ = dying
    events = read_events(workdir)
    moves = [event for event in events if event['kind'] == 'move']
    moved = {event['request'] for event in moves}
    deaths = [start - down for start, down in drawn_ends(max(event['time'] for event in events))]
    assert moves
    assert all(min(abs(event['time'] - death) for death in deaths) < 0.5 for event in moves)  # connections end at once
    decoded = sum(event['tokens'] - event.get('discarded', 0) for event in events if event['kind'] == 'decode')
    assert decoded == sum(event['tokens'] for event in events if event['kind'] == 'finish')
    lengths = parse_lengths('lognormal(300, 0.75)', 900)
    of_moved = [e for e in events if e['kind'] == 'finish' and f'0/{e["draw"]}/{e["sample"]}' in moved]
    assert of_moved
    for event in of_moved:
        assert event['tokens'] == lengths.draw(0, event['draw'], event['sample'])


def test_joined_dispatches_change_no_event_but_their_own(tmp_path):
    simulate_both_ways(tmp_path, **DYING)
    assert starts(tmp_path / 'True') == starts(tmp_path / 'False')


def test_a_resumed_simulation_has_the_deaths_of_the_whole_one(tmp_path):
    train_until_killed(simulate(tmp_path, **DYING, checkpoint__every=1), 4)
    simulate(tmp_path, resume=True, **DYING, checkpoint__every=1).train()
    assert main_check_log.main([str(tmp_path)]) == ExitCode.FINISHED
    assert len(read_metrics(tmp_path / 'metrics.jsonl')) == 10
    again = [event['time'] for event in read_events(tmp_path) if event['kind'] == 'log'][1]
    at_once = [engine for engine, _, time in starts(tmp_path) if time == again]
    assert len(at_once) == len(set(at_once))  # none of those that died before
    later = [start for start in starts(tmp_path) if start[2] > again]
    assert later
    assert set(later) <= set(drawn_starts(2 * max(time for *_, time in later)))


def test_a_run_without_servers_saves_its_state_and_ends(tmp_path):
    fields = {**SERVERS, 'simulation__failures': 'constant(4)', 'simulation__restart': 'constant(9000)'}
    with pytest.raises(LostPeerError, match=r'no server has served for 300 s \(run.stall_timeout_s\)'):
        simulate(tmp_path, **fields).train()
    assert list((tmp_path / 'checkpoints').glob('step_*'))


def test_engines_of_the_learner_do_not_die_alone(tmp_path):
    with pytest.raises(ConfigError, match='engines in the process of the learner end the run with them; use rollout'):
        simulate(tmp_path, simulation__failures='exponential(100)')
