"""Runs with a critic: resumed bit for bit, exported, read again, and never sent to an engine."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import pytest

from areal_jax.app.export.run_export import replace_export
from areal_jax.app.library import build_run
from areal_jax.config import validate
from areal_jax.config.fields import ConfigError
from areal_jax.formats.hf_directory import load_hf
from areal_jax.formats.safetensors_file import FILE, ValueHeadError, read_value_head, write_value_head
from areal_jax.models.decoder import Decoder
from areal_jax.publication.export import export_hf
from areal_jax.telemetry.metrics import read_metrics
from tests.app.small import resume_killed, small_config
from tests.learning.examples import tiny_decoder

WIDE = Decoder(dataclasses.replace(tiny_decoder(1).config, vocab_size=4))
CRITIC = {'loss__objective': 'ppo_critic', 'critic__learning_rate': 1e-2, 'checkpoint__every': 2}


@pytest.mark.whole
@pytest.mark.parametrize('model', [pytest.param('trunk', marks=pytest.mark.slow), 'copy'])
def test_a_killed_run_goes_on_with_its_critic_and_exports_it(tmp_path: pathlib.Path, model: str):
    fields = {**CRITIC, 'critic__model': model, 'run__export': True}
    resume_killed(tmp_path, **fields)
    assert all(line['critic/loss'] > 0 for line in read_metrics(tmp_path / 'whole' / 'metrics.jsonl'))
    assert 'advantage gae' in (tmp_path / 'whole' / 'export' / 'README.md').read_text()
    exported = tmp_path / 'whole' / 'export'
    head = read_value_head(exported, 32)
    assert np.abs(head['weight']).max() > 0
    _, policy = load_hf(exported)[:2]
    assert 'critic' not in policy
    assert (exported / 'critic' / FILE).is_file()
    (exported / 'critic' / 'of_an_earlier_export').touch()
    replace_export(tmp_path / 'whole', 5, 'float32')
    assert not (exported / 'critic' / 'of_an_earlier_export').exists()
    assert (exported / 'critic' / FILE).is_file()
    if model == 'copy':
        _, values = load_hf(exported / 'critic')[:2]
        assert np.abs(values['embedding'] - policy['embedding']).max() > 0
        again = build_run(small_config(**CRITIC, critic__model=str(exported / 'critic')), tmp_path / 'again')
        critic = again.site.learner.state.params['critic']
        again.close()
        np.testing.assert_array_equal(critic['value_head']['weight'], head['weight'])
        np.testing.assert_array_equal(critic['embedding'], values['embedding'])


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'optimizer__blocks': 2}, r"ppo_critic' with optimizer.blocks=2: a critic is trained in every update"),
        (
            {
                'loss__surrogate': 'oapl',
                'staleness__eta': 0.0,
                'loss__whiten': 'none',
                'loss__ratio': 'sequence',
                'loss__ratio_denominator': 'behavior',
                'loss__correction': 'none',
                'loss__aggregation': 'sequence_mean',
            },
            r"loss.surrogate='oapl' with .*advantage='gae'",
        ),
        ({'critic__trunk_gradient': 1.5}, r'critic.trunk_gradient=1.5 must lie in'),
    ],
)
def test_what_a_critic_does_not_go_with_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        validate(small_config(**CRITIC, **fields))


@pytest.mark.parametrize(('model', 'message'), [('nowhere', 'is no directory'), ('wide', 'd_model')])
def test_a_critic_that_cannot_be_read_is_refused(tmp_path: pathlib.Path, model: str, message: str):
    export_hf(tmp_path / 'wide', WIDE.init(0), WIDE.config, dtype='float32')
    config = small_config(**CRITIC, critic__model=str(tmp_path / model))
    with pytest.raises(ConfigError, match=rf'critic.model=.*{message}'):
        build_run(config, tmp_path / 'run')


def test_a_head_of_another_width_or_with_nan_is_refused(tmp_path: pathlib.Path):
    assert read_value_head(tmp_path, 4) is None
    write_value_head(tmp_path, {'weight': np.ones(4), 'bias': np.array(2.0)})
    found = read_value_head(tmp_path, 4)
    np.testing.assert_array_equal([*found['weight'], found['bias']], [1, 1, 1, 1, 2])
    with pytest.raises(ValueHeadError, match='the value head of this model'):
        read_value_head(tmp_path, 5)
    write_value_head(tmp_path / 'critic', {'weight': np.array([1, np.nan]), 'bias': np.array(2.0)})
    with pytest.raises(ValueHeadError, match='NaN or infinity'):
        read_value_head(tmp_path / 'critic', 2)
