from __future__ import annotations

import pytest

from areal_jax.app.workdir import note_weights, prepare_workdir, sample_digest
from areal_jax.ranges import ConfigError

_VALUES = {'mesh': {'fsdp': 8}, 'learner': {'layers': 'list', 'rows_per_microbatch': 8, 'epochs': 1}}


@pytest.mark.parametrize(
    'change',
    [{'mesh': {'fsdp': 2}}, {'learner': {**_VALUES['learner'], 'layers': 'stacked', 'rows_per_microbatch': 2}}],
)
def test_a_run_may_go_on_elsewhere_and_in_another_form(tmp_path, change):
    prepare_workdir(tmp_path, _VALUES, resume=False)
    prepare_workdir(tmp_path, _VALUES | change, resume=True)
    assert f'"{next(iter(change))}"' in (tmp_path / 'config.json').read_text()


def test_a_run_may_not_go_on_with_another_objective(tmp_path):
    prepare_workdir(tmp_path, _VALUES, resume=False)
    with pytest.raises(ConfigError, match=r'learner.epochs: 1 -> 2; use the same, or a new workdir'):
        prepare_workdir(tmp_path, _VALUES | {'learner': {**_VALUES['learner'], 'epochs': 2}}, resume=True)


def test_a_run_does_not_go_on_from_other_weights_of_the_same_size(tmp_path):
    weights = tmp_path / 'model'
    weights.mkdir()
    shard = weights / 'model.safetensors'
    values = bytearray(range(256)) * 8192  # 2 MiB, twice what is sampled
    shard.write_bytes(values)
    note_weights(tmp_path, weights, resume=False)
    note_weights(tmp_path, weights, resume=True)
    shard.write_bytes(bytes(value ^ 1 for value in values))
    with pytest.raises(ConfigError, match=r'model.path=.* are not those that the run in .* started from'):
        note_weights(tmp_path, weights, resume=True)


def test_a_digest_of_samples_sees_both_ends_and_the_size(tmp_path):
    file = tmp_path / 'small.gguf'
    digests = set()
    for content in (b'', b'a', b'a' * 5000, b'b' + b'a' * 4999, b'a' * 4999 + b'b', b'a' * 5001):
        file.write_bytes(content)
        digests.add(sample_digest(file))
    assert len(digests) == 6
