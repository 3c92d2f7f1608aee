"""The fields cluster.learner and cluster.engines: what they mean, and one sentence for each wrong text."""

import itertools

import pytest

from areal_jax.config import default_config
from areal_jax.config.cluster import (
    AXES,
    EngineGroup,
    EnginesLayout,
    LearnerLayout,
    RoleCount,
    describe_former,
    has_roles,
    list_roles,
    parse_engines,
    parse_learner,
    require_fit,
)
from areal_jax.config.fields import ConfigError


def test_sizes_not_named_are_1():
    assert parse_learner('data=1') == LearnerLayout(1, 1, 1, 1, 1)
    assert parse_learner('tensor=3, data=2').sizes == (2, 1, 1, 1, 3)
    assert parse_learner('data=2,fsdp=2,tensor=3').devices == 12
    assert parse_learner('data=2,fsdp=2,tensor=3').data_shards == 4
    assert parse_learner('fsdp=2,expert=4,tensor=3').data_shards == 8


@pytest.mark.parametrize('sizes', [*itertools.product((1, 3), repeat=5)])
def test_a_layout_is_written_as_it_is_parsed(sizes):
    layout = LearnerLayout(**dict(zip(AXES, sizes, strict=True)))
    assert parse_learner(str(layout)) == layout


def test_hosts_are_the_processes_that_share_the_mesh():
    layout = parse_learner('hosts=4 x fsdp=8,tensor=2')
    assert (layout.processes, layout.devices, layout.devices_per_process) == (4, 16, 4)
    assert parse_learner('hosts=4x context=4') == LearnerLayout(context=4, hosts=4)  # 'context' has an x
    assert str(layout) == 'hosts=4 x fsdp=8,tensor=2'
    assert parse_learner(str(layout)) == layout
    assert (parse_learner('fsdp=8').hosts, parse_learner('fsdp=8').processes) == (None, 1)


@pytest.mark.parametrize(
    ('learner', 'engines', 'server', 'roles'),
    [
        ('hosts=4 x fsdp=8,tensor=2', '8 x tensor=2', 'own', [('learner', 4, 4), ('engine', 8, 2)]),
        ('hosts=1 x expert=4', '2 x expert=2,tensor=2', 'own', [('learner', 1, 4), ('engine', 2, 4)]),
        ('data=2', '3 x shared', 'vllm', [('learner', 1, 2), ('engine', 3, 1)]),
        ('hosts=2 x data=2', '3 x tensor=1', 'external', [('learner', 2, 1)]),
    ],
)
def test_the_roles_of_a_run_come_from_the_config(learner, engines, server, roles):
    config = default_config()
    config.cluster.learner, config.cluster.engines, config.rollout.server = learner, engines, server
    assert list_roles(config) == [RoleCount('controller', 1, 0), *(RoleCount(*role) for role in roles)]
    assert has_roles(config) == learner.startswith('hosts')


def test_an_exporter_is_a_role_where_it_is_asked_for():
    config = default_config()
    config.run.export_every = 4
    assert list_roles(config)[-1] == RoleCount('exporter', 1, 0)


def test_engines_share_the_learners_device_or_have_their_own():
    assert parse_engines('1 x shared') == EnginesLayout((EngineGroup(1, shared=True),))
    assert parse_engines('2xtensor=4') == EnginesLayout((EngineGroup(2, shared=False, tensor=4),))
    assert parse_engines('2 x tensor=4, expert=2').groups == (EngineGroup(2, shared=False, tensor=4, expert=2),)
    texts = ['3 x shared', '2 x tensor=1', '2 x tensor=4', '1 x expert=2', '3 x expert=2,tensor=2']
    assert [parse_engines(text).devices for text in texts] == [0, 2, 8, 2, 12]
    assert [str(parse_engines(text.replace(' x ', 'x'))) for text in texts] == texts


def test_groups_of_engines_of_unequal_size_have_their_devices_one_after_the_other():
    layout = parse_engines('2 x tensor=2+1 x expert=2,tensor=2 + 2xtensor=1')
    assert str(layout) == '2 x tensor=2 + 1 x expert=2,tensor=2 + 2 x tensor=1'
    assert (layout.count, layout.devices, layout.sizes) == (5, 10, (2, 2, 4, 1, 1))
    assert [[*numbers] for numbers in layout.place(3)] == [[3, 4], [5, 6], [7, 8, 9, 10], [11], [12]]
    selected = [str(layout.select(index)) for index in (1, 2, 3)]
    assert selected == ['1 x tensor=2', '1 x expert=2,tensor=2', '1 x tensor=1']
    assert [layout.find_group(devices).expert for devices in (1, 2, 4)] == [1, 1, 2]
    assert str(parse_engines('2 x tensor=2 + 1 x tensor=2')) == '3 x tensor=2'
    with pytest.raises(ConfigError, match=r"^cluster.engines='2 x .* has engines of unequal size, .*; use equal eng"):
        _ = layout.devices_each


def test_roles_of_engines_of_unequal_size_say_the_devices_of_each():
    config = default_config()
    config.cluster.engines, config.rollout.server = '1 x tensor=4 + 2 x tensor=1', 'own'
    engine = list_roles(config)[-1]
    assert (engine.count, [engine.devices_of(index) for index in range(3)]) == (3, [4, 1, 1])


WRONG = [
    (
        parse_learner,
        'fdsp=4',
        "cluster.learner='fdsp=4': there is no axis 'fdsp'; did you mean fsdp?; use data, fsdp, ex",
    ),
    (parse_learner, 'fsdp=0', "cluster.learner='fsdp=0': the size of fsdp must be a whole number, at least 1"),
    (parse_learner, 'fsdp=-1', 'the size of fsdp must be'),
    (parse_learner, 'fsdp=2.5', 'the size of fsdp must be'),
    (parse_learner, 'fsdp=99999999999', 'the size of fsdp must be'),
    (parse_learner, 'fsdp=2,fsdp=2', "cluster.learner='fsdp=2,fsdp=2' names the axis fsdp twice"),
    (parse_learner, 'fsdp', "'fsdp' has no 'AXIS=SIZE'; write 'fsdp=4' or 'data=2,fsdp=2'"),
    (parse_learner, '', "cluster.learner='': '' has no 'AXIS=SIZE'"),
    (parse_learner, 'fsdp=2,', "cluster.learner='fsdp=2,': '' has no 'AXIS=SIZE'"),
    (parse_learner, 'hosts=3 x fsdp=8', 'a mesh of 8 devices cannot be shared out among 3 processes evenly; use a num'),
    (parse_learner, 'hosts=0 x fsdp=8', 'the number of hosts must be a whole number, at least 1; write'),
    (parse_learner, 'hosts= x fsdp=8', 'the number of hosts must be a whole number, at least 1; write'),
    (parse_learner, 'hosts=2', "hosts stand before the mesh; write 'hosts=2 x fsdp=8': 8 devices, 4 in each of 2 pro"),
    (parse_learner, 'hosts=2,fsdp=8', 'hosts stand before the mesh'),
    (parse_learner, 'fsdp=8,hosts=2', "there is no axis 'hosts'"),
    (
        parse_engines,
        '2',
        "cluster.engines='2' has no 'NUMBER x WHERE'; write '2 x shared' (on the learner's first device)",
    ),
    (parse_engines, '', "cluster.engines='' has no 'NUMBER x WHERE'"),
    (parse_engines, '2 x', 'has no'),
    (parse_engines, '2 shared', "has no 'NUMBER x WHERE'"),
    (parse_engines, '0 x shared', "'0' engines must be a whole number from 1 to 1024"),
    (parse_engines, 'two x shared', "'two' engines must be a whole number"),
    (parse_engines, '2 x shard', "'shard' is not known; did you mean shared?; write '2 x shared'"),
    (parse_engines, '2 x tensr=1', "there is no axis 'tensr'; did you mean tensor?"),
    (parse_engines, '2 x fsdp=3', "an engine share the axes expert and tensor alone; use '2 x tensor=3'"),
    (parse_engines, '2 x tensor=2,tensor=2', "cluster.engines='2 x tensor=2,tensor=2' names the axis tensor twice"),
    (parse_engines, '2 x tensor=2,', "'' has no 'AXIS=SIZE'"),
    (parse_engines, '2 x tensor=0', 'the size of tensor must be a whole number, at least 1'),
    (parse_engines, '2 x tensor=2 + ', "has no 'NUMBER x WHERE'"),
    (parse_engines, '1 x shared + 1 x tensor=1', "engines on the learner's device beside engines on their own: give"),
    (parse_engines, '1 x expert=2 + 1 x tensor=2', 'cuts engines of equally many devices in two ways; give them the'),
    (parse_engines, '1000 x tensor=1 + 25 x tensor=2', 'has 1025 engines; name at most 1024'),
]


@pytest.mark.parametrize(('parse', 'text', 'message'), WRONG)
def test_a_wrong_text_is_named_with_the_fix(parse, text, message):
    with pytest.raises(ConfigError) as refused:
        parse(text)
    assert message in str(refused.value)
    assert text in str(refused.value)
    assert '\n' not in str(refused.value)


def test_too_few_devices_name_both_fields_the_sizes_and_the_fix():
    # 4 of the learner and 2 of one engine are 6, of which the platform has 5
    learner, engines = parse_learner('fsdp=4'), parse_engines('1 x tensor=2')
    assert require_fit(learner, engines, 6, 'cpu') is None
    with pytest.raises(ConfigError) as refused:
        require_fit(learner, engines, 5, 'cpu')
    assert str(refused.value) == (
        "cluster.learner='fsdp=4' needs 4 devices and cluster.engines='1 x tensor=2' needs 2, 6 together; the platform "
        "'cpu' has 5: lower a size, share the learner's with cluster.engines='1 x shared', or set "
        'XLA_FLAGS=--xla_force_host_platform_device_count=6 before jax is imported'
    )
    with pytest.raises(
        ConfigError, match=r"^cluster.learner='fsdp=4' needs 4 devices; the platform 'tpu' has 3: lower a size$"
    ):
        require_fit(learner, parse_engines('2 x shared'), 3, 'tpu')


def test_former_fields_are_answered_with_the_new_ones():
    assert describe_former({'mesh.fsdp': 4}) == "mesh.fsdp=4: this field was replaced; use cluster.learner='fsdp=4'"
    assert describe_former({'mesh.fsdp': '4', 'mesh.data': '2', 'rollout.engines': '3', 'rollout.slots': '8'}) == (
        "mesh.fsdp=4, mesh.data=2, rollout.engines=3: these fields were replaced; use cluster.learner='data=2,fsdp=4', "
        "cluster.engines='3 x shared'"
    )
    assert describe_former({'mesh.strategy': 'tensor'}).endswith("use cluster.strategy='tensor'")
    assert describe_former({'mesh.fsdp': None}).endswith("use cluster.learner='fsdp=N'")  # --config.mesh.fsdp 4
    assert describe_former({'sft.export_dtype': 'float16'}) == (
        "sft.export_dtype=float16: this field was replaced; use run.export_dtype='float16'"
    )
    assert describe_former({'rollout.slots': 8, 'learner.fill': 'first_fit'}) is None
