"""Where compiled programs are kept, what stderr shows before the first update, and a trace of some updates."""

from __future__ import annotations

import gzip
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from areal_jax.app.library import build_run
from areal_jax.app.parts.compilations import (
    TracedLearner,
    find_device_warnings,
    find_warnings,
    print_passed_over,
    print_warnings,
    use_compilation_cache,
)
from areal_jax.config import TrackedConfig, default_config
from areal_jax.learning import row_layout as layout
from areal_jax.rollout.decode import generate
from areal_jax.rollout.decode.attention.loops import LoopAttention
from tests.app.run.test_supervised import sft_config
from tests.app.small import SmallRun, small_config

LEAST = 'jax_persistent_cache_min_compile_time_secs'


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(LEAST.upper(), raising=False)


def use(cache: pathlib.Path | str):
    return use_compilation_cache(TrackedConfig(small_config(run__compilation_cache=str(cache))))


def compile_for_long(layers):
    """A program of many instructions, of which XLA leaves none out."""
    x = jnp.ones((layers + 2, 3))

    def program(x):
        for i in range(layers):
            x = jnp.sort(jnp.tanh(x @ x.T) @ x, axis=i % 2)
        return x

    jax.jit(program).lower(x).compile()


def test_programs_that_take_less_than_a_second_are_kept(tmp_path):
    with use(tmp_path / 'cache'):
        compile_for_long(150)  # about 0.4 s on an idle machine
    assert list((tmp_path / 'cache').iterdir())


@pytest.mark.parametrize('cache', ['', 'cache'])
def test_the_settings_of_jax_come_back(tmp_path, cache):
    before = dict(jax.config.values)
    with use(cache and tmp_path / cache):
        assert jax.config.values[LEAST] == 0.1
    assert jax.config.values == before


def test_a_variable_of_the_environment_wins(tmp_path, monkeypatch):
    monkeypatch.setenv(LEAST.upper(), '7')
    before = jax.config.values[LEAST]
    with use(tmp_path):
        assert jax.config.values[LEAST] == before


# What stderr shows before the first update.


def test_a_warm_up_that_outlasts_the_run_is_warned_of(capsys):
    config = default_config()
    config.optimizer.warmup_steps = config.run.steps
    assert list(find_warnings(config)) == []
    config.optimizer.warmup_steps += 1
    (said,) = find_warnings(config)
    assert said.startswith('optimizer.warmup_steps=21 is more than the 20 optimizer steps of the run')
    print_warnings(config)
    assert capsys.readouterr().err == f'warning: {said}\n'
    config.learner.epochs = 2
    assert list(find_warnings(config)) == []


def test_a_combination_that_does_less_than_it_says_is_warned_of():
    config = default_config()
    config.loss.objective = 'grpo'
    (said,) = find_warnings(config)
    assert said.startswith("loss.surrogate='clip' (of loss.objective='grpo') over loss.ratio_denominator='proximal'")


def test_a_virtual_clock_on_a_gpu_needs_a_flag(monkeypatch):
    config = default_config()
    config.run.clock = 'virtual'
    monkeypatch.delenv('XLA_FLAGS', raising=False)
    (said,) = find_device_warnings(config, 'gpu')
    assert "XLA_FLAGS='--xla_gpu_deterministic_ops=true " in said
    assert list(find_device_warnings(config, 'cpu')) == []
    monkeypatch.setenv('XLA_FLAGS', '--xla_gpu_deterministic_ops=true --xla_other=1')
    assert list(find_device_warnings(config, 'gpu')) == []


def test_engines_in_bfloat16_on_a_cpu_are_warned_of():
    config = default_config()
    config.publication.dtype = 'bfloat16'
    (said,) = find_device_warnings(config, 'cpu')
    assert said.startswith("publication.dtype='bfloat16' on a CPU: ")
    assert "use publication.dtype='float32'" in said
    assert list(find_device_warnings(config, 'gpu')) == []
    config.rollout.server = 'vllm'
    assert list(find_device_warnings(config, 'cpu')) == []


def test_a_backend_that_auto_passes_over_is_warned_of_with_the_reason(capsys):
    print_passed_over('learner.attention', ())
    assert capsys.readouterr().err == ''
    print_passed_over('learner.attention', ("attention 'cudnn' fails its self-check: ...",))
    assert capsys.readouterr().err == (
        "warning: learner.attention='auto' passes over a backend: attention 'cudnn' fails its self-check: ...\n"
    )


def test_a_run_shows_the_backends_that_its_learner_passed_over(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(layout, 'choose_checked', lambda *_, **__: ('dense', ("attention 'cudnn' does not run here",)))
    SmallRun(tmp_path).session.close()
    assert "passes over a backend: attention 'cudnn' does not run here" in capsys.readouterr().err


def test_a_run_shows_the_attentions_that_its_engines_passed_over(tmp_path, monkeypatch, capsys):
    plain = lambda impl, demand, device: (LoopAttention(), ("rollout.attention='pallas_gpu' does not run here",))
    monkeypatch.setattr(generate, 'choose_checked', plain)
    SmallRun(tmp_path, rollout__slots=7).session.close()  # sizes of no other test: its engines are built anew
    shown = (
        "warning: rollout.attention='auto' passes over a backend: rollout.attention='pallas_gpu' does not run here\n"
    )
    assert capsys.readouterr().err.count(shown) == 1


# `telemetry.profile_steps`: a trace of the named updates, and the same weights as without it.


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
