"""Whole runs whose engines fail and drift like servers in other processes, and one whose servers never come."""

from __future__ import annotations

import dataclasses
import functools
import json
import re

import pytest

from areal_jax.app.parts.compilations import print_warnings
from areal_jax.app.parts.host import EndedBy, Servers
from areal_jax.app.parts.server_builder import build_server_settings, find_max_mismatch
from areal_jax.app.parts.task_builder import build_task
from areal_jax.app.process.ending import end_command
from areal_jax.app.run import own_site
from areal_jax.app.run.run import Run, RunKind
from areal_jax.app.workdir.run_directory import CHECKPOINTS
from areal_jax.errors import ExitCode
from areal_jax.lanes import LEARNER
from areal_jax.report.aggregates import conservation
from areal_jax.rollout.servers.keeper import MismatchWatch
from areal_jax.rollout.servers.server_pool import ServerPool
from areal_jax.types import PublishedWeights, Work
from tests.app import small
from tests.rollout.servers.local_server import LocalServer

FAST = {'health_every_s': 0.05, 'retry_s': 0.02, 'ask_s': 1.0}


class Joins:
    """In the place of the registry: every server joins at once, and engine/1 drifts from a version on."""

    def __init__(self, clock, pool, servers, drift):
        self._clock, self._pool, self._servers, (self._from_version, self._bias) = clock, pool, servers, drift

    async def run(self):
        for server in self._servers:
            self._pool.join(server, 1, 'local')
        while self._pool.target.version < self._from_version:
            await self._clock.wait(self._clock.event('look at the version'), 0.01)
        self._servers[1].bias = self._bias


def build_served(context, monkeypatch, bad_draws, drift, settings):
    """Engines of this process behind ServerPool, under the virtual clock; the loop hears what one of servers hears."""
    found, build_engines = {}, own_site.build_engines

    def load(context):
        found['model'] = own_site.load_model(context)
        return found['model']

    def build_noted(*parts):
        found['published'] = next(part for part in parts if isinstance(part, PublishedWeights))
        return build_engines(*parts)

    def build_pool(config, engines, clock, log, supervisor):
        clock.prices['score'] = 0.001

        async def score(version, prompt, answer):
            return await clock.run(LEARNER, lambda: found['learner'].score(version, prompt, answer), Work('score'))

        probe_prompt = build_task(config, found['model'].tokenizer).prompts('train', 0).draw().tokens
        pool = ServerPool(
            clock, log, supervisor, dataclasses.replace(build_server_settings(config, probe_prompt), **settings),
            published=found['published'], score=score, on_no_server=pytest.fail,
        )  # fmt: skip
        joins = Joins(clock, pool, [LocalServer(engine, bad_draws) for engine in engines], drift)
        watch = MismatchWatch(find_max_mismatch(config), pool.quarantine)
        found['servers'] = Servers(pool, joins, watch, EndedBy(pytest.fail))
        return pool

    with monkeypatch.context() as patch:
        patch.setattr(own_site, 'build_engines', build_noted)
        patch.setattr(own_site, 'build_pool', build_pool)
        site, loop = own_site.build_own_loop(context, load=load)
    found['learner'], parts = site.learner, loop.parts
    parts.metrics.listeners.insert(0, found['servers'].note_update)
    loop.parts = dataclasses.replace(parts, generation=parts.generation._replace(servers=found['servers']))
    return site, loop


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Trains with two servers; returns the run."""

    def run(bad_draws=(), drift=(10**9, 0.0), settings=FAST, **fields):
        build_loop = functools.partial(
            build_served, monkeypatch=monkeypatch, bad_draws=bad_draws, drift=drift, settings=settings
        )
        build = functools.partial(Run, RunKind(own_site.require_here, print_warnings, build_loop))
        return small.SmallRun(tmp_path, build_run=build, cluster__engines='2 x shared', **fields).train()

    return run


def test_an_engine_whose_logprobs_drift_is_taken_out_and_named(train, tmp_path):
    large = {'learner__groups_per_update': 16, 'rollout__max_running_groups': 16, 'staleness__eta': 0.0}
    run = train(drift=(3, -0.05), run__steps=10, **large)
    states = [e for e in run.events if e['kind'] == 'engine_state' and e['state'] == 'quarantined']
    assert {e['engine'] for e in states} == {'engine/1'}
    first = states[0]
    said = re.fullmatch(
        r"its log-probs differ from the learner's by (0\.0\d+) on average over (\d+) tokens "
        r'\(rollout\.max_mismatch=0\.001\)', first['reason'],
    )  # fmt: skip
    assert said
    assert 1e-3 < float(said[1]) < 0.0501  # some were generated before the drift
    assert int(said[2]) >= 500
    later = [e for e in run.events if e['seq'] > first['seq']]
    assert {e['engine'] for e in later if e['kind'] == 'route'} == {'engine/0'}
    assert {e['outcome'] for e in later if e['kind'] == 'probe'} == {'failed'}
    assert conservation(run.events) == []
    assert run.report['finished']
    lines = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    drifted = [line['mismatch/of/engine/1/mean_abs'] for line in lines if 'mismatch/of/engine/1/n' in line]
    assert drifted[0] < 1e-4
    assert 1e-3 < max(drifted) < 0.0501
    of = run.report['mismatch']['by_engine']
    assert of['engine/0']['mean'] < 1e-4
    assert of['engine/1']['mean'] > 1e-3


def test_a_group_that_no_server_finishes_is_dropped_and_the_lengths_are_reported(train, tmp_path):
    run = train(bad_draws=(3,), settings=FAST | {'max_retries': 2})
    (drop,) = [e for e in run.events if e['kind'] == 'drop']
    assert (drop['draw'], drop['reason']) == (3, 'engine_lost')
    assert run.report['groups']['dropped'] == {'engine_lost': 1}
    lost = run.report['groups']['lost']
    assert (lost['lost'], lost['lost_tokens_mean']) == (4, 0.0)
    assert lost['finished_tokens_mean'] > 1
    assert '| answers that no engine finished | 4, 0 tokens on average |' in (tmp_path / 'report.md').read_text()
    attempts = [e['attempt'] for e in run.events if e['kind'] == 'move' and e['request'] == '0/3/0']
    assert attempts[-1] == 3
    assert conservation(run.events) == []


@pytest.mark.parametrize('fails', [False, True])
def test_however_a_run_ends_it_lets_its_servers_go(train, monkeypatch, fails):
    """Which ends what they are paused for: see tests/rollout/http/clients/test_own.py."""

    async def close(server):
        closed.append(server.name)

    async def fail(pool):
        raise ZeroDivisionError

    closed = []
    monkeypatch.setattr(LocalServer, 'close', close)
    if fails:
        monkeypatch.setattr(ServerPool, 'pause', fail)
        with pytest.raises(ZeroDivisionError):
            train()
    else:
        assert train().report['finished']
    assert closed == ['engine/0', 'engine/1']


def test_a_run_whose_servers_never_come_saves_its_state_and_ends_as_after_a_lost_peer(tmp_path, capsys):
    served = {'run__clock': 'real', 'rollout__server': 'own', 'publication__channel': 'files'}
    run = small.SmallRun(tmp_path, run__stall_timeout_s=0.5, **served)
    code = end_command(lambda: run.train() and 0, doing='training')
    assert code == ExitCode.STOPPED
    assert capsys.readouterr().err.splitlines()[-1] == (
        'error: no server has served for 0.5 s (run.stall_timeout_s): none has registered; see their logs; start '
        'servers, and go on with --resume'
    )
    assert (tmp_path / CHECKPOINTS / 'step_00000000').is_dir()
    again = small.SmallRun(tmp_path, resume=True, run__stall_timeout_s=0.5, **served)
    assert again.version_at_start == 0
    again.session.close()
