import importlib
import pathlib

import pytest

from areal_jax.config import CHOICES, ConfigError, TrackedConfig, default_config, flatten, validate

CONFIGS = sorted(p.stem for p in (pathlib.Path(__file__).parent.parent / 'configs').glob('*.py'))


@pytest.mark.parametrize('name', CONFIGS)
def test_every_config_validates(name):
    config = importlib.import_module(f'configs.{name}').get_config()
    assert validate(config) is None
    assert dict(flatten(config)).keys() == dict(flatten(default_config())).keys()


def test_every_field_of_the_schema_is_commented():
    source = (pathlib.Path(__file__).parent.parent / 'areal_jax' / 'config.py').read_text()
    for path, _ in flatten(default_config()):
        line = next(line for line in source.splitlines() if line.strip().startswith(f'c.{path} = '))
        assert '#' in line, f'{path} has no comment'


BAD = [
    ({'run.clock': 'fast'}, r"run\.clock='fast' is not known; use one of real, virtual"),
    ({'run.steps': 0}, r'run\.steps=0 must be at least 1'),
    ({'rollout.temperature': 0.0}, r'rollout\.temperature=0\.0 must be above 0'),
    ({'rollout.top_p': 0.0}, r'rollout\.top_p=0\.0'),
    ({'staleness.eta': -1.0}, r'staleness\.eta=-1\.0 must be at least 0'),
    ({'staleness.eta': 2.0, 'staleness.schedule': 'fixed(3)'}, r"schedule='fixed\(3\)'.*staleness\.eta=2\.0.*remove"),
    ({'staleness.schedule': 'fixed(3)', 'checkpoint.every': 2}, r'checkpoint\.every=0 \(it is 2\)'),
    ({'staleness.max_token_age': 3}, r"max_token_age=3 and staleness\.over_age='off' go together"),
    ({'staleness.over_age': 'drop'}, r"max_token_age=None and staleness\.over_age='drop' go together"),
    ({'rollout.group_size': 1}, r'rollout\.group_size=1.*use rollout\.group_size >= 2'),
    ({'buffer.capacity': 3}, r'buffer\.capacity=3 can never hold learner\.groups_per_update=8'),
    ({'rollout.max_new_tokens': 64}, r'rollout\.max_new_tokens=64 leaves no room.*context_tokens=64'),
    ({'rollout.prefill_buckets': (16,)}, r'prefill_buckets=\(16,\).*context_tokens - 1 = 63'),
    ({'learner.row_tokens': 32}, r'learner\.row_tokens=32 must hold.*context_tokens=64'),
    ({'learner.row_loss_tokens': 8}, r'learner\.row_loss_tokens=8 must hold.*max_new_tokens=16'),
    ({'mesh.fsdp': 4}, r'rows_per_microbatch=1 must be a multiple of mesh\.data \* mesh\.fsdp = 4'),
    ({'model.source': 'gguf'}, r"model\.source='gguf' needs model\.path"),
]


@pytest.mark.parametrize(('fields', 'message'), BAD, ids=[' '.join(fields) for fields, _ in BAD])
def test_what_cannot_run_is_named_with_the_fix(fields, message):
    config = default_config()
    config.update_from_flattened_dict(fields)
    with pytest.raises(ConfigError, match=message):
        validate(config)


def test_every_choice_is_a_field_with_a_legal_default():
    values = dict(flatten(default_config()))
    assert all(values[path] in choices for path, choices in CHOICES.items())


def test_a_field_that_was_set_and_never_read_is_an_error():
    config = default_config()
    config.optimizer.b2 = 0.99
    config.rollout.slots = 3
    tracked = TrackedConfig(config)
    assert tracked.rollout.slots == 3
    with pytest.raises(ConfigError, match=r'set but never read: optimizer\.b2=0\.99.*remove the setting'):
        tracked.require_all_read()
    assert tracked.optimizer.b2 == 0.99
    tracked.require_all_read()


def test_a_field_at_its_default_needs_no_reader():
    assert TrackedConfig(default_config()).unread() == []


def test_an_unknown_field_is_refused():
    with pytest.raises((KeyError, AttributeError), match='slotz'):
        default_config().rollout.slotz = 3
