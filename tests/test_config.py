import importlib
import math
import pathlib

import numpy as np
import pytest

from areal_jax.config import CHOICES, TrackedConfig, default_config, flatten, validate
from areal_jax.ranges import RANGES, ConfigError

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
    (
        {'staleness.schedule': 'fixed(3)', 'staleness.over_age': 'drop', 'staleness.max_token_age': 2},
        r"schedule='fixed\(3\)' fixes the age of every batch, so staleness\.over_age='drop'",
    ),
    ({'staleness.max_token_age': 3}, r"max_token_age=3 and staleness\.over_age='off' go together"),
    ({'staleness.over_age': 'drop'}, r"max_token_age=None and staleness\.over_age='drop' go together"),
    (
        {'rollout.top_p': 0.9},
        r"rollout\.top_k=0 and rollout\.top_p=0\.9 draw .* loss\.truncated_sampling='full_softmax' \(it is 'refuse'\)",
    ),
    ({'rollout.top_k': 5}, r'rollout\.top_k=5 and rollout\.top_p=1\.0 draw from a part of the softmax'),
    ({'rollout.group_size': 1}, r'rollout\.group_size=1.*use rollout\.group_size >= 2'),
    ({'buffer.capacity': 3}, r'buffer\.capacity=3 can never hold learner\.groups_per_update=8'),
    ({'rollout.max_new_tokens': 64}, r'rollout\.max_new_tokens=64 leaves no room.*context_tokens=64'),
    ({'rollout.prefill_buckets': (16,)}, r'prefill_buckets=\(16,\).*context_tokens - 1 = 63'),
    ({'learner.row_tokens': 32}, r'learner\.row_tokens=32 must hold.*context_tokens=64'),
    ({'learner.row_loss_tokens': 8}, r'learner\.row_loss_tokens=8 must hold.*max_new_tokens=16'),
    ({'mesh.fsdp': 4}, r'rows_per_microbatch=1 must be a multiple of mesh\.data \* mesh\.fsdp = 4'),
    ({'model.source': 'gguf'}, r"model\.source='gguf' needs model\.path"),
    ({'rollout.prefill_buckets': ()}, r'prefill_buckets=\(\).*context_tokens - 1 = 63'),
    ({'model.n_kv_heads': 3}, r'model\.n_heads=4 must be a multiple of model\.n_kv_heads=3'),
    ({'model.head_dim': 7}, r'model\.head_dim=7 must be even'),
    ({'mesh.fsdp': 0}, r'mesh\.fsdp=0 must be at least 1'),
    ({'optimizer.learning_rate': -1e-4}, r'optimizer\.learning_rate=-0\.0001 must not be negative, infinite or NaN'),
    ({'optimizer.learning_rate': None}, r'optimizer\.learning_rate=None must not be negative, infinite or NaN'),
    ({'optimizer.b2': 1.0}, r'optimizer\.b2=1\.0 must lie in \[0, 1\)'),
    ({'optimizer.b2': 1 - 1e-9}, r'optimizer\.b2=0\.999999999 must lie in \[0, 1\), in float32'),  # rounds to 1 there
    ({'optimizer.eps': 0.0}, r'optimizer\.eps=0\.0 must be above 0 and finite'),
    ({'optimizer.eps': 1e-50}, r'optimizer\.eps=1e-50 must be above 0 and finite, in float32'),  # rounds to 0 there
    ({'loss.clip_epsilon': 1.5}, r'loss\.clip_epsilon=1\.5 must lie in \(0, 1\]'),
    ({'loss.clip_epsilon_high': 0.0}, r'clip_epsilon_high=0\.0 must be above 0 and finite, in float32, or be None'),
    ({'lora.rank': -1}, r'lora\.rank=-1 must not be negative'),
    ({'lora.alpha': 0.0}, r'lora\.alpha=0\.0 must be above 0'),
]


@pytest.mark.parametrize(('fields', 'message'), BAD, ids=[' '.join(fields) for fields, _ in BAD])
def test_what_cannot_run_is_named_with_the_fix(fields, message):
    config = default_config()
    config.update_from_flattened_dict(fields)
    with pytest.raises(ConfigError, match=message):
        validate(config)


def test_every_number_of_the_schema_has_a_range():
    numbers = {path for path, value in flatten(default_config()) if type(value) in (int, float)}
    left_out = {path for path, value in flatten(default_config()) if value is None}
    assert RANGES.keys() == numbers | left_out  # a field that may be None holds a number otherwise


@pytest.mark.parametrize('value', [math.nan, -math.inf, math.inf])
def test_no_float_is_accepted_that_is_not_finite(value):
    floats = [path for path, number in flatten(default_config()) if type(number) is float]
    for path in [*floats, 'loss.clip_epsilon_high', 'loss.behavior_weight_cap']:
        config = default_config()
        config.update_from_flattened_dict({path: value})
        if (path, value) == ('staleness.eta', math.inf):
            assert validate(config) is None  # unbounded
            continue
        with pytest.raises(ConfigError, match=rf'^{path}={value} must ') as refused:
            validate(config)
        assert '\n' not in str(refused.value)


def test_bounds_are_those_of_float32():
    # a bound is the last number that float32 tells from the one it stands for
    for path, below, above in (('optimizer.b1', -0.1, 1.0), ('learner.loss_scale', 0.0, math.inf)):
        for bound, outside in ((RANGES[path].low, below), (RANGES[path].high, above)):
            assert bound in RANGES[path]
            assert outside not in RANGES[path]
            assert float(np.float32(bound)) == bound


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
