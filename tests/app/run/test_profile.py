"""`telemetry.profile_steps`: a trace of the named updates, and the same weights as without it."""

from __future__ import annotations

import gzip
import json
import pathlib

import jax
import pytest

from areal_jax.app.run.profile import TracedLearner
from areal_jax.app.training import build_run
from tests.app.run.test_supervised import sft_config
from tests.app.small import SmallRun


def trace(workdir: pathlib.Path) -> list[dict]:
    """The events of the only trace in WORKDIR/profile, in the form of Chrome's trace viewer."""
    assert len(list(workdir.glob('profile/plugins/profile/*/*.xplane.pb'))) == 1
    (file,) = workdir.glob('profile/plugins/profile/*/*.trace.json.gz')
    return json.loads(gzip.decompress(file.read_bytes()))['traceEvents']


def updates(events: list[dict]) -> list[int]:
    return sorted(int(event['args']['step_num']) for event in events if event.get('name') == 'update')


def programs(events: list[dict]) -> set[str]:
    """Names of the compiled programs whose operations are in the trace."""
    return {event['args']['hlo_module'] for event in events if 'hlo_module' in event.get('args', {})}


def test_the_trace_has_the_named_updates_and_the_generation_beside_them(tmp_path: pathlib.Path):
    plain = SmallRun(tmp_path / 'plain').train()
    traced = SmallRun(tmp_path / 'traced', telemetry__profile_steps=(2, 4)).train()
    events = trace(tmp_path / 'traced')
    assert updates(events) == [2, 3, 4]
    names = programs(events)
    assert {'jit_accumulate', 'jit_apply', 'jit_export'} <= names  # of the learner
    assert any('generate' in name for name in names), names  # of the engine
    assert traced.report['weights_sha256'] == plain.report['weights_sha256']
    assert not (tmp_path / 'plain' / 'profile').exists()


def test_supervised_training_is_traced_and_a_stop_ends_the_trace(tmp_path: pathlib.Path):
    session = build_run(sft_config(telemetry__profile_steps=(2, 6)), tmp_path)
    update = session.site.learner.update

    def stop_after_3(groups, version):
        if version == 2:
            session.program.stop_requested.set()
        return update(groups, version)

    session.site.learner.update = stop_after_3
    assert session.train() is None
    assert updates(trace(tmp_path)) == [2, 3]
    jax.profiler.start_trace(str(tmp_path / 'other'))  # none is being recorded any more
    jax.profiler.stop_trace()


class _Learner:
    def update(self, groups, version):
        return {'update': version + 1}


@pytest.mark.parametrize(
    ('first', 'last', 'made', 'recorded'),
    [
        (3, 5, range(1, 8), [3, 4, 5]),
        (3, 3, range(1, 8), [3]),
        (3, 5, range(5, 8), [5]),  # resumed after update 4
        (3, 5, range(6, 8), []),
    ],
)
def test_which_updates_are_recorded(tmp_path, monkeypatch, first, last, made, recorded):
    log: list = []
    monkeypatch.setattr(jax.profiler, 'start_trace', lambda *_, **__: log.append('start'))
    monkeypatch.setattr(jax.profiler, 'stop_trace', lambda: log.append('stop'))
    learner = TracedLearner(_Learner(), first, last, tmp_path)
    for number in made:
        log.append(learner.update([], number - 1)['update'])
    learner.close()
    inside = log[log.index('start') + 1 : log.index('stop')] if recorded else []
    # the last update returns after the trace is written, so it follows 'stop' here
    assert inside == recorded[:-1]
    assert log.count('start') == log.count('stop') == bool(recorded)
    assert not recorded or log[log.index('stop') + 1] == recorded[-1]
