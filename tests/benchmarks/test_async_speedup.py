"""benchmarks/async_speedup.py: its work, its arithmetic and what it reads from the log of a run."""

import json

import pytest

from areal_jax.errors import UserError
from benchmarks import async_speedup, timed_run


def lane(start, end, run, work, name, **detail):
    return [
        {'kind': 'run_start', 'time': start, 'lane': name, 'run': run, 'work': work, 'amount': 1, **detail},
        {'kind': 'run_done', 'time': end, 'lane': name, 'run': run, 'work': work, 'amount': 1, 'started': start,
         'seconds': end - start, 'seq': run},
    ]  # fmt: skip


def test_the_learner_waits_for_copies_and_for_the_version_before():
    """Version 2 is handed over when version 1 is on its way: 5.0; version 3 at once."""
    events = [
        *lane(1.0, 2.0, 0, 'snapshot', 'learner', update=1),
        *lane(4.0, 4.5, 1, 'snapshot', 'learner', update=2),
        *lane(5.0, 6.0, 2, 'publish', 'publish/0', version=1),
        *lane(6.0, 7.0, 3, 'publish', 'publish/0', version=2),
        *lane(9.0, 9.25, 4, 'snapshot', 'learner', update=3),
    ]
    events.sort(key=lambda event: event['time'])
    assert timed_run.publication_wait(events, 0) == pytest.approx(1.0 + 0.5 + 0.5 + 0.25)
    assert timed_run.publication_wait(events, 2) == pytest.approx(0.25)


def test_tokens_are_those_of_the_updates_that_are_timed(tmp_path):
    events = [
        *({'kind': 'finish', 'time': 0.0, 'lane': None, 'draw': draw, 'tokens': 10 + draw} for draw in (0, 0, 1, 2)),
        {'kind': 'consume', 'time': 1.0, 'lane': None, 'update': 1, 'draws': [0]},
        {'kind': 'publish', 'time': 2.0, 'lane': None, 'version': 1},
        {'kind': 'consume', 'time': 2.5, 'lane': None, 'update': 2, 'draws': [1, 2]},
        {'kind': 'publish', 'time': 6.0, 'lane': None, 'version': 2},
    ]
    path = tmp_path / 'events.jsonl'
    path.write_text(''.join(json.dumps(event) + '\n' for event in events))
    assert timed_run.read_events(path, 1) == (4.0, 23.0, 0.0)


def test_the_baseline_is_the_best_synchronous_run():
    def runs(wall_s, cpu_s):
        return [{'wall_s': 0, 'cpu_s': 0, 'checks': {'tokens': 1, 'part_wall_s': wall_s, 'part_cpu_s': cpu_s}}] * 3

    found = async_speedup.gains({
        'synchronous, 8 slots': runs(4.0, 5.0), 'synchronous, 16 slots': runs(3.0, 6.0), 'asynchronous': runs(2.0, 8.0)
    })  # fmt: skip
    assert (found['against_wall'], found['against_cpu']) == ('synchronous, 16 slots', 'synchronous, 8 slots')
    assert found['asynchronous_gain_wall'] == pytest.approx(0.5)
    assert found['asynchronous_gain_cpu'] == pytest.approx(5 / 8 - 1)


@pytest.mark.parametrize(('arguments', 'says'), [
    (['--lengths=odd'], "'odd'"), (['--steps=2', '--first=2'], '--first=2'), (['--threads=4'], '--threads=4'),
])  # fmt: skip
def test_options_that_cannot_be_are_refused(arguments, says):
    with pytest.raises(UserError, match=says):
        async_speedup.read_options(arguments)


@pytest.mark.parametrize(
    ('arguments', 'groups', 'size'), [(['--groups=8'], 8, None), (['--groups=8', '--small'], 2, 2)]
)
def test_every_arm_gets_updates_of_so_many_groups(monkeypatch, tmp_path, arguments, groups, size):
    seen = []

    def run_arm(arm, config, overrides, workdir, first):
        seen.append((arm.name, overrides['learner.groups_per_update'], overrides.get('rollout.group_size')))
        return {'wall_s': 1, 'cpu_s': 1, 'checks': {'tokens': 1, 'publication_wait_share': 0.02}}

    monkeypatch.setattr(async_speedup, 'run_arm', run_arm)
    options = async_speedup.read_options([*arguments, '--turns=1', '--arms=asynchronous'])
    row = async_speedup.measure_lengths(options, 'equal', tmp_path)
    assert seen == [('asynchronous', groups, size)]
    assert (row['publication_wait_share'], row['wait_met']) == (0.02, False)
