import importlib
import math
import pathlib
import re

import numpy as np
import pytest
from ml_collections import config_dict

from areal_jax.config import TrackedConfig, default_config, flatten, page, validate
from areal_jax.config.declarations import FIELDS, find_free, require_allowed
from areal_jax.config.fields import Choice, ConfigError, Integer, Purpose, Real

ROOT = pathlib.Path(__file__).parents[2]
CONFIGS = sorted(p.stem for p in (ROOT / 'configs').glob('*.py'))


@pytest.mark.parametrize('name', CONFIGS)
def test_every_config_validates(name):
    config = importlib.import_module(f'configs.{name}').get_config()
    assert validate(config) is None
    paths = {path for path in dict(flatten(config)) if not find_free(path)}
    assert paths == dict(flatten(default_config())).keys()


def test_every_declared_default_is_of_its_type_and_allowed():
    assert {type(field).__name__ for field in FIELDS.values()} == {
        *('Integer', 'Real', 'Flag', 'Text', 'Path', 'Choice', 'ChoiceOrOwn', 'Lengths', 'Texts', 'Hosts', 'Options'),
        *('GroupCount', 'Sources', 'FlagsText', 'Address'),
    }
    for path, field in FIELDS.items():
        field.require_type(path, field.default)
        require_allowed({path: field.default})


@pytest.mark.parametrize('host', ['', 'http://gpu7', 'gpu7:8000', '0.0.0.0', '*', 'a b', '[::1]'])
def test_a_host_is_a_name_or_an_address_alone(host):
    require_allowed({'server.hosts': ('gpu7', 'Gpu-8.example', '10.0.0.5', 'fd00::5')})
    with pytest.raises(
        ConfigError, match=rf'^server\.hosts=.* must be a tuple of names .* {re.escape(repr(host))} is none'
    ):
        require_allowed({'server.hosts': ('gpu7', host)})


def test_every_field_has_a_meaning():
    assert [path for path, field in FIELDS.items() if len(field.meaning) < 5] == []


def test_the_default_config_keeps_the_type_of_a_field_that_may_be_none():
    config = default_config()
    assert config.staleness.max_token_age is None
    assert config.staleness.get_type('max_token_age') is int
    assert config.loss.get_type('behavior_weight_cap') is float


def test_the_page_of_the_config_is_made_from_the_declarations():
    written = ROOT / 'docs' / 'config.md'
    assert written.read_text() == page.render(), f'docs/config.md is out of date; run {page.COMMAND}'


def test_the_page_names_default_rule_and_meaning():
    line = next(line for line in page.render().splitlines() if line.startswith('| `rollout.top_p` '))
    assert line == '| `rollout.top_p` | `1.0` | lie in (0, 1] | ' + FIELDS['rollout.top_p'].meaning + ' |'


_SERVERS = {'rollout.server': 'own', 'publication.channel': 'files'}
_DELTA = {'publication.delta': True, 'publication.channel': 'files', 'publication.dtype': 'bfloat16'}
_VLLM = _SERVERS | {'rollout.server': 'vllm'}
_ROUTES = {
    'rollout.record_routes': True, 'model.family': 'qwen3_moe', 'model.experts': 8, 'model.experts_per_token': 2,
    'model.d_expert': 32, 'run.clock': 'real', 'publication.channel': 'files',
}  # fmt: skip

BAD = [
    ({'rollout.top_p': 0.0}, r'rollout\.top_p=0\.0'),
    (
        {'rollout.top_p': 0.9},
        r"rollout\.top_k=0 and rollout\.top_p=0\.9 draw .* loss\.truncated_sampling='full_softmax' \(it is 'refuse'\)",
    ),
    ({'rollout.top_k': 5}, r'rollout\.top_k=5 and rollout\.top_p=1\.0 draw from a part of the softmax'),
    ({'task.system_prompt': 'a\0b'}, r"task\.system_prompt='a\\x00b' must be text in UTF-8, without zero bytes"),
    (
        {'rollout.block_tokens': 48, 'rollout.cache_tokens': 95},  # a sequence of 64 takes two blocks of 48
        r'cache_tokens=95 holds no sequence of rollout\.context_tokens=64 in blocks of rollout\.block_tokens=48; '
        r'raise it to 96 or more, or set 0$',
    ),
    (
        {'task.name': 'jsonl', 'task.path': 'x', 'task.answer': 'math', 'task.verifier': 'inline'},
        r"task\.verifier='inline' cannot end .* task\.answer='math' needs; use task\.verifier='process'",
    ),
    (
        {'task.answer': 'maths'},
        r"task\.answer='maths' is not known; use one of integer, number, exact, normalised, math",
    ),
    ({'optimizer.learning_rate': None}, r'optimizer\.learning_rate=None must be a number'),
    ({'optimizer.b2': 1 - 1e-9}, r'optimizer\.b2=0\.999999999 must lie in \[0, 1\), in float32'),  # rounds to 1 there
    ({'optimizer.eps': 1e-50}, r'optimizer\.eps=1e-50 must be above 0 and finite, in float32'),  # rounds to 0 there
    ({'loss.clip_epsilon_high': 0.0}, r'clip_epsilon_high=0\.0 must be above 0 and finite, in float32, or be None'),
    (
        {'rollout.server': 'tgi'},
        r"server='tgi' is not known; use one of in_process, own, vllm, sglang, jetstream, external",
    ),
    ({'rollout.urls': ('vllm+http://a:1',)}, r"rollout\.urls=.* with rollout\.server='in_process' would not be used"),
    (
        _SERVERS | {'rollout.weights': 'int8'},
        r"rollout\.weights='int8' with rollout\.server='own': .* use rollout\.server='in_process', or rollout\.weig",
    ),
    (
        {'rollout.weights': 'int8', 'publication.dtype': 'bfloat16'},
        r"rollout\.weights='int8' with publication\.dtype='bfloat16': .* use publication\.dtype='float32', or",
    ),
    (
        {'rollout.weights': 'int8', 'lora.rank': 4},
        r"rollout\.weights='int8' with lora\.rank=4: .* use lora\.rank=0, or rollout\.weights='published'",
    ),
    (_DELTA | {'publication.channel': 'device'}, r"channel='device': it carries whole versions only; use .*='files'"),
    (
        _DELTA | {'publication.dtype': 'float32'},
        r"dtype='float32': 99.8 % of the elements .* no delta is smaller; use publication\.dtype='bfloat16', or",
    ),
    (
        _DELTA | {'cluster.learner': 'hosts=2 x fsdp=2'},
        r"learner='hosts=2 x fsdp=2': each process writes its own leaves, .* use publication\.channel='stream', or",
    ),
    (
        _DELTA | {'rollout.server': 'external', 'rollout.urls': ('vllm+http://a:1',)},
        r"server='external': these servers load whole directories; use .*='own', or",
    ),
    ({'publication.base_every': 0}, r'publication\.base_every=0 must be at least 1'),
    (
        _VLLM | {'publication.channel': 'shm'},
        r"channel='shm' with rollout\.server='vllm': these servers load directories of files; use .*='files', or ",
    ),
    (
        _SERVERS
        | {'publication.channel': 'stream', 'cluster.learner': 'hosts=2 x data=2', 'publication.listen': '10.0.0.1:70'},
        r"listen='10\.0\.0\.1:70' with .*: 2 processes cannot listen at one port; use 'own', or no port",
    ),
    ({'publication.listen': 'node:port'}, r"listen='node:port' must be a host or host:port, with brackets"),
    (_SERVERS | {'rollout.server': 'external'}, r"rollout\.server='external' needs rollout\.urls"),
    (_SERVERS | {'run.clock': 'virtual'}, r"run\.clock='virtual' with rollout\.server='own': .* use run\.clock='real'"),
    (_SERVERS | {'publication.channel': 'device'}, r"channel='device' .* use publication\.channel='files'"),
    (
        _SERVERS | {'evaluation.every': 2},
        r'every=2 .*: servers do not keep the weights of an earlier version',
    ),
    (
        _SERVERS | {'evaluation.every': 2},
        r'every=2 .*: .* set one of cluster\.engines aside with evaluation\.engines=1 \(runs in roles\)',
    ),
    ({'evaluation.engines': 1}, r'evaluation\.engines=1 sets engines aside for evaluation\.every=0'),
    (
        _SERVERS | {'evaluation.every': 2, 'evaluation.engines': 1},
        r"engines=1 with .*cluster\.learner='data=1': servers are set aside in runs in roles; use .*'hosts=1 x \.\.\.'",
    ),
    (
        _SERVERS | {'evaluation.every': 2, 'evaluation.engines': 1, 'cluster.learner': 'hosts=1 x data=1'},
        r"evaluation\.engines=1 leaves none of the 1 engines of cluster\.engines='1 x shared' to training",
    ),
    ({'run.export_every': 4}, r"export_every=4 with cluster\.learner='data=1': runs in roles have an exporter"),
    (
        _SERVERS | {'run.export_every': 4, 'cluster.learner': 'hosts=1 x data=1'},
        r'run\.export_every=4 must be a multiple of checkpoint\.every=0',
    ),
    (
        _SERVERS | {'run.export_every': 4, 'cluster.learner': 'hosts=1 x data=1', 'checkpoint.every': 3},
        r'run\.export_every=4 must be a multiple of checkpoint\.every=3',
    ),
    (_SERVERS | {'staleness.schedule': 'fixed(2)'}, r'servers do not go back to an earlier version of the weights'),
    (_VLLM | {'cluster.engines': '2 x expert=4'}, r"='2 x expert=4' with rollout\.server='vllm': .* '2 x tensor=4'"),
    (_VLLM | {'rollout.kv_policy': 'keep'}, r"kv_policy='keep' with rollout\.server='vllm': .* use .*='recompute'"),
    (
        _VLLM | {'rollout.top_k': 4, 'loss.truncated_sampling': 'full_softmax'},
        r'rollout\.top_k=4 .*: these servers give no log-probs of the part of the softmax that is sampled',
    ),
    ({'rollout.max_mismatch': 0.0}, r'rollout\.max_mismatch=0\.0 must be above 0'),
    (
        _ROUTES | {'rollout.server': 'jetstream'},
        r"record_routes=True with rollout\.server='jetstream': these servers .* use 'in_process' or 'own' or",
    ),
    ({'rollout.record_routes': True}, r'rollout\.record_routes=True needs a model with experts, and model\.experts=0'),
    ({'learner.routes': 'replay'}, r"learner\.routes='replay' follows .* rollout\.record_routes=False: set it to True"),
]


@pytest.mark.parametrize('server', ['in_process', 'own', 'vllm', 'sglang', 'external'])
def test_servers_that_tell_which_experts_tokens_reach_may_record_them(server):
    config = default_config()
    config.update_from_flattened_dict(_ROUTES | {'rollout.server': server, 'learner.routes': 'replay'})
    config.rollout.urls = ('vllm+http://host:1',) if server == 'external' else ()
    validate(config)


@pytest.mark.parametrize(('fields', 'message'), BAD, ids=[' '.join(fields) for fields, _ in BAD])
def test_what_cannot_run_is_named_with_the_fix(fields, message):
    config = default_config()
    config.update_from_flattened_dict(fields)
    with pytest.raises(ConfigError, match=message):
        validate(config)


@pytest.mark.parametrize('value', [math.nan, -math.inf, math.inf])
def test_no_float_is_accepted_that_is_not_finite(value):
    for path in [path for path, field in FIELDS.items() if isinstance(field, Real)]:
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
        field = FIELDS[path]
        assert isinstance(field, Real)
        for bound, outside in ((field.range.low, below), (field.range.high, above)):
            assert bound in field.range
            assert outside not in field.range
            assert float(np.float32(bound)) == bound


@pytest.mark.parametrize('path', [path for path, field in FIELDS.items() if isinstance(field, Choice | Integer | Real)])
def test_what_no_field_may_hold_is_refused(path):
    config = default_config()
    outside = 'nothing' if isinstance(FIELDS[path], Choice) else -1
    config.update_from_flattened_dict({path: outside})
    with pytest.raises(ConfigError, match=f'^{path}='):
        validate(config)


def test_an_override_that_is_never_read_is_an_error():
    config = default_config()
    config.virtual.save_s = 0.99
    config.rollout.slots = 3
    tracked = TrackedConfig(config, ['virtual.save_s', 'rollout.slots'])
    assert tracked.rollout.slots == 3
    with pytest.raises(ConfigError, match=r'set but never read: virtual\.save_s=0\.99\. This run.*remove the setting'):
        tracked.require_all_read()
    assert tracked.virtual.save_s == 0.99
    tracked.require_all_read()


def test_a_field_that_the_config_file_sets_may_be_idle_and_is_listed():
    config = default_config()
    config.virtual.save_s = 0.99
    config.rollout.slots = 3
    tracked = TrackedConfig(config, ['rollout.slots'])
    assert tracked.rollout.slots == 3
    tracked.require_all_read()
    assert tracked.idle_fields() == ['virtual.save_s=0.99']


@pytest.mark.parametrize('purpose', Purpose)
def test_sections_of_training_are_used_by_runs_that_train(purpose):
    config = default_config()
    config.optimizer.b2, config.learner.epochs = 0.99, 2
    unread = TrackedConfig(config, purpose=purpose).unread()
    trains = purpose is Purpose.TRAINING
    assert unread == ([] if trains else [('learner.epochs', 2), ('optimizer.b2', 0.99)])


def test_a_field_at_its_default_needs_no_reader():
    assert TrackedConfig(default_config()).unread() == []


def plain_config(**sections):
    """The default config as an experiment file that does not start from default_config() would write it."""
    return config_dict.ConfigDict({**default_config().to_dict(), **sections})


def without(section, field):
    values = default_config().to_dict()[section]
    return {section: {name: value for name, value in values.items() if name != field}}


@pytest.mark.parametrize(
    ('sections', 'message'),
    [
        ({'rolout': {'slots': 3}}, r"rolout: there is no section 'rolout' in the config; did you mean rollout\?"),
        ({'rollout': 3}, 'rollout=3 must be a section with fields: start from'),
        (without('rollout', 'slots'), r'the config has no field rollout\.slots: start from'),
        ({'buffer': {'capacity': 3, 'capacty': 4}}, r'buffer\.capacty is not a field.*did you mean buffer\.capacity\?'),
        ({'buffer': {'capacity': 'many'}}, r"buffer\.capacity='many' must be a whole number"),
        ({'buffer': {'capacity': True}}, r'buffer\.capacity=True must be a whole number'),
        ({'buffer': {'capacity': 8.0}}, r'buffer\.capacity=8\.0 must be a whole number'),
        ({'buffer': {'capacity': None}}, r'buffer\.capacity=None must be a whole number'),
    ],
)
def test_a_config_of_another_shape_than_the_declared_one_is_named(sections, message):
    assert validate(plain_config()) is None
    with pytest.raises(ConfigError, match=message):
        validate(plain_config(**sections))


def test_a_config_without_a_section_is_named():
    config = plain_config()
    del config.virtual
    with pytest.raises(
        ConfigError, match=r"the config has no section 'virtual': start from areal_jax\.config\.default"
    ):
        validate(config)


def test_an_unknown_field_is_refused():
    with pytest.raises((KeyError, AttributeError), match='slotz'):
        default_config().rollout.slotz = 3
