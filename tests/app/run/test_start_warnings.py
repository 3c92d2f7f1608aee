"""What stderr shows before the first update."""

from areal_jax.app.run.start_warnings import find_device_warnings, find_warnings, print_passed_over, print_warnings
from areal_jax.config import default_config
from areal_jax.learning import row_layout as layout
from areal_jax.rollout.decode import generate
from areal_jax.rollout.decode.attention.loops import LoopAttention
from tests.app.small import SmallRun


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
