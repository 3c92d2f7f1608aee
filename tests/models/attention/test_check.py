"""The self-check passes what is right and refuses, by name, the faults that fused kernels have had."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import pytest

from areal_jax.models.attention import check, flash, splash
from areal_jax.models.attention.backends import AttentionError
from areal_jax.models.attention.check import choose_checked, self_check
from tests.models.attention.rows import INTERPRETED, runs_here


@runs_here
def test_a_right_backend_passes(impl):
    self_check(impl, dtype=jnp.float32, head_dim=16, interpret=impl in INTERPRETED)


@runs_here
def test_a_right_backend_passes_with_sinks(impl):
    self_check(impl, dtype=jnp.float32, head_dim=16, window=4096, sinks=True, interpret=impl in INTERPRETED)


def no_sink_gradient(attend):
    return lambda q, k, v, ids, setting, sinks: attend(q, k, v, ids, setting, jax.lax.stop_gradient(sinks))


def test_sinks_without_a_gradient_are_refused(monkeypatch):
    monkeypatch.setattr(flash, 'attend_dense', no_sink_gradient(flash.attend_dense))
    with pytest.raises(AttentionError, match='gradient of the sinks of a packed row is off by'):
        self_check('dense', dtype=jnp.float32, head_dim=16, sinks=True)


@pytest.mark.parametrize('features', [{'window': 4096}, {'slices': True}], ids=['window', 'slices'])
def test_window_and_slices_are_checked_in_the_dtype_of_the_run(features):
    self_check('blocked', dtype=jnp.bfloat16, head_dim=16, **features)


def wrong_heads(attend):
    """Query head h reads key head h modulo K, not h // G."""
    return lambda q, k, v, *rest: attend(q, k[:, :, ::-1], v[:, :, ::-1], *rest)


def wrong_gradient(attend):
    """Forward right, gradients of keys stopped."""
    return lambda q, k, v, *rest: attend(q, jax.lax.stop_gradient(k), v, *rest)


def without_segments(attend):
    def ignoring(q, k, v, ids, setting):
        ones = jnp.ones_like(ids.segment)
        return attend(q, k, v, ids._replace(segment=ones, parent=ones), setting)

    return ignoring


def without_parents(attend):
    return lambda q, k, v, ids, setting: attend(q, k, v, ids._replace(parent=ids.segment), setting)


def without_scale(attend):
    return lambda q, k, v, ids, setting: attend(q, k, v, ids, setting._replace(scale=1.0))


def without_window(attend):
    return lambda q, k, v, ids, setting: attend(q, k, v, ids, setting._replace(window=None))


def from_the_start(attend):
    return lambda q, k, v, ids, setting: attend(q, k, v, ids._replace(first=0), setting)


@pytest.mark.parametrize(
    ('fault', 'features', 'message'),
    [
        (wrong_heads, {}, 'output of a packed row is off by'),
        (wrong_gradient, {}, 'gradient of k of a packed row is off by 1 of'),
        (without_segments, {}, 'output of a packed row is off by'),
        pytest.param(without_parents, {}, 'output of a row with a shared prompt is off by', marks=pytest.mark.slow),
        pytest.param(without_scale, {}, 'output of a packed row is off by', marks=pytest.mark.slow),
        pytest.param(without_window, {'window': 4096}, 'output of a packed row is off by', marks=pytest.mark.slow),
        pytest.param(from_the_start, {'slices': True}, 'output of a packed row is off by', marks=pytest.mark.slow),
    ],
)
def test_a_wrong_backend_is_refused(monkeypatch, fault, features, message):
    monkeypatch.setattr(flash, 'attend_dense', fault(flash.attend_dense))
    dtype = 'bfloat16' if fault is without_parents else 'float32'
    pattern = f"attention 'dense' fails its self-check: {message} .* in {dtype} on 'cpu', allowed are .*; use 'blocked'"
    with pytest.raises(AttentionError, match=pattern):
        self_check('dense', dtype=dtype, head_dim=16, **features)


def test_not_a_number_is_refused(monkeypatch):
    monkeypatch.setattr(flash, 'attend_dense', lambda q, *rest: q * jnp.nan)
    with pytest.raises(AttentionError, match='off by nan'):
        self_check('dense', dtype='float32', head_dim=16)


def test_a_backend_that_does_not_run_here_is_refused():
    with pytest.raises(AttentionError, match=r"attention 'cudnn' does not run here: .*; use 'blocked'"):
        self_check('cudnn', dtype='bfloat16', head_dim=16)
    with pytest.raises(AttentionError, match=r"attention 'pallas' does not run here: Only interpret .*; use 'blocked'"):
        self_check('pallas', dtype='bfloat16', head_dim=16)


def test_auto_passes_over_what_fails_and_says_why(monkeypatch):
    monkeypatch.setattr(check, 'describe_device', lambda device: ('tpu', None))
    monkeypatch.setattr(splash, 'attend_rows', wrong_heads(flash.attend_dense))
    facts = {'tokens': 4096, 'dtype': 'float32', 'head_dim': 16}
    name, reasons = choose_checked('auto', **facts)
    assert name == 'blocked'
    assert [r.split(':')[0] for r in reasons] == ["attention 'splash' fails its self-check"]
    with pytest.raises(AttentionError, match="'splash' fails its self-check"):
        choose_checked('splash', **facts)


def test_on_a_device_that_is_only_described_nothing_is_checked(monkeypatch):
    monkeypatch.setattr(check, 'self_check', lambda *args, **kwargs: pytest.fail('the check ran'))
    described = types.SimpleNamespace(platform='tpu')  # of a topology: no process has it
    facts = {'tokens': 4096, 'dtype': 'float32', 'head_dim': 16, 'device': described}
    assert choose_checked('auto', **facts) == ('splash', ())
    assert choose_checked('blocked', **facts) == ('blocked', ())
    gpu = types.SimpleNamespace(platform='gpu', compute_capability='9.0')
    facts |= {'device': gpu, 'dtype': 'bfloat16'}
    said = "attention 'cudnn' cannot be compiled for a device that is only described"
    assert choose_checked('auto', **facts) == ('pallas', (said,))
    with pytest.raises(AttentionError, match=said):
        choose_checked('cudnn', **facts)


def test_a_run_on_this_machine_gets_a_checked_backend():
    assert choose_checked('auto', tokens=4096, dtype='float32', head_dim=16) == ('blocked', ())


def test_a_process_checks_once_what_passes_and_again_what_fails(monkeypatch):
    checked = []

    def note(impl, *, dtype, head_dim, window, slices, sinks):
        checked.append((impl, dtype, head_dim, window is not None, slices, sinks))

    monkeypatch.setattr(check, 'self_check', note)
    facts = {'tokens': 300, 'dtype': 'float32', 'head_dim': 1234}  # of no other test
    for changes in (
        {},
        {'tokens': 400},
        {'dtype': jnp.float32},
        {'window': 8},
        {'window': 9},
        {'slices': True},
        {'sinks': True},
        {},
    ):
        assert choose_checked('auto', **facts | changes) == ('blocked', ())
    with jax.default_matmul_precision('bfloat16'):
        choose_checked('auto', **facts)
    without, windowed, sliced, sunk = (False,) * 3, (True, False, False), (False, True, False), (False, False, True)
    assert checked == [('blocked', 'float32', 1234, *mask) for mask in (without, windowed, sliced, sunk, without)]

    def fail(*_, **__):
        checked.append('fails')
        raise AttentionError('wrong')

    monkeypatch.setattr(check, 'self_check', fail)
    for _ in range(2):
        with pytest.raises(AttentionError, match='wrong'):
            choose_checked('blocked', **facts | {'head_dim': 4321})
    assert checked[5:] == ['fails', 'fails']
