"""What stderr shows before the first update."""

from areal_jax.app.start_warnings import find_warnings, print_passed_over, print_warnings
from areal_jax.config import default_config


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


def test_a_backend_that_auto_passes_over_is_warned_of_with_the_reason(capsys):
    print_passed_over(())
    assert capsys.readouterr().err == ''
    print_passed_over(("attention 'cudnn' fails its self-check: ...",))
    assert capsys.readouterr().err == (
        "warning: learner.attention='auto' passes over a backend: attention 'cudnn' fails its self-check: ...\n"
    )
