"""What a run notes of its environment: flags of XLA belong to accelerators."""

from areal_jax.app.workdir import environment


def test_flags_of_accelerators_are_told_with_their_hardware(monkeypatch):
    monkeypatch.setenv('XLA_FLAGS', '--xla_a=1')
    monkeypatch.setenv('LIBTPU_INIT_ARGS', '--xla_b=2')
    assert [environment.read_xla_flags(of) for of in ('gpu', 'tpu', 'cpu')] == ['--xla_a=1', '--xla_b=2', '']
    assert environment.hardware(['cuda:0'], '--xla_a=1')['xla_flags'] == '--xla_a=1'
    assert 'xla_flags' not in environment.hardware()  # this process computes on the CPU
    assert environment.read_environment(['cuda:0'])['settings']['LIBTPU_INIT_ARGS'] == '--xla_b=2'
