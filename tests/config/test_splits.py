"""Plans and ladders of splits, and what a run whose devices move does not take."""

from __future__ import annotations

import pytest

from areal_jax.config import validate
from areal_jax.config.cluster import DeviceSplit
from areal_jax.config.fields import ConfigError
from areal_jax.config.splits import list_rungs, read_plan
from tests.app.small import small_config

MOVING = {'cluster__learner': 'fsdp=2', 'cluster__engines': '6 x tensor=1', 'learner__rows_per_microbatch': 4}


def moving(**fields):
    return small_config(**MOVING | {'cluster__reallocate': 'auto'} | fields)


def write(tmp_path, *lines):
    file = tmp_path / 'plan.jsonl'
    file.write_text('\n'.join(lines))
    return f'plan({file})'


def test_a_plan_has_a_split_for_each_of_its_updates(tmp_path):
    text = write(
        tmp_path, '{"update": 3, "learner": "fsdp=4", "engines": "4 x tensor=1"}', '',
        '{"update": 7, "learner": "data=1", "engines": "3 x tensor=2"}',
    )  # fmt: skip
    assert read_plan(text) == {3: DeviceSplit('fsdp=4', '4 x tensor=1'), 7: DeviceSplit('data=1', '3 x tensor=2')}
    config = moving(cluster__reallocate=text)
    before = config.to_dict()
    validate(config)
    assert config.to_dict() == before


@pytest.mark.parametrize(
    ('lines', 'message'),
    [
        ((), 'the file is empty'),
        (('{"update": 3}',), 'line 1 is .{"update": 3}.; write'),
        (('nothing',), "line 1 is 'nothing'; write"),
        (('{"update": 1, "learner": "fsdp=4", "engines": "4 x tensor=1"}',), 'update 1 must be 2 or later'),
        (('{"update": 5, "learner": "fsdp=4", "engines": "4 x tensor=1"}',) * 2, 'line 2: update 5 must be 6 or later'),
    ],
)
def test_a_line_that_is_no_split_is_refused_by_its_number(tmp_path, lines, message):
    with pytest.raises(ConfigError, match=message):
        read_plan(write(tmp_path, *lines))


def test_a_plan_without_a_file_is_refused():
    with pytest.raises(ConfigError, match=r"cluster.reallocate='plan\(none.jsonl\)': the file cannot be read"):
        validate(moving(cluster__reallocate='plan(none.jsonl)'))


def test_a_split_that_the_rows_cannot_be_shared_out_over_is_refused(tmp_path):
    text = write(tmp_path, '{"update": 3, "learner": "fsdp=3", "engines": "5 x tensor=1"}')
    with pytest.raises(ConfigError, match=r'has the split fsdp=3 \| 5 x tensor=1: learner.rows_per_microbatch=4 must'):
        validate(moving(cluster__reallocate=text))
    text = write(tmp_path, '{"update": 3, "learner": "fsdp=4", "engines": "4 x shared"}')
    with pytest.raises(ConfigError, match="has neither hosts= nor 'shared'"):
        validate(moving(cluster__reallocate=text))


def test_the_rungs_of_auto_share_out_the_same_devices():
    assert list_rungs(moving()) == [
        DeviceSplit('data=1', '7 x tensor=1'),
        DeviceSplit('fsdp=2', '6 x tensor=1'),
        DeviceSplit('fsdp=4', '4 x tensor=1'),
    ]
    assert list_rungs(moving(cluster__engines='3 x tensor=2')) == [
        DeviceSplit('fsdp=2', '3 x tensor=2'), DeviceSplit('fsdp=4', '2 x tensor=2'),
    ]  # fmt: skip
    # 3 devices do not divide 4 rows; the other axis stays
    tensor = moving(cluster__learner='tensor=2', cluster__engines='2 x tensor=2', cluster__strategy='fsdp_tensor')
    assert list_rungs(tensor) == [
        DeviceSplit('tensor=2', '2 x tensor=2'),
        DeviceSplit('fsdp=2,tensor=2', '1 x tensor=2'),
    ]


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'cluster__reallocate': 'often'}, "cluster.reallocate='often' is not known; use 'off', 'auto' or 'plan"),
        ({'cluster__engines': '2 x shared'}, "with cluster.engines='2 x shared': engines on the device of the learner"),
        ({'cluster__learner': 'hosts=2 x fsdp=2'}, 'a learner of several processes cannot change them while it runs'),
        ({'staleness__schedule': 'fixed(1)'}, r"with staleness.schedule='fixed\(1\)': in lock-step"),
        ({'evaluation__every': 2, 'evaluation__problems': 4}, 'with evaluation.every=2: its weights'),
        ({'optimizer__blocks': 2}, 'with optimizer.blocks=2'),
        ({'diagnostics__ratio_sample': 0.1}, 'with diagnostics.ratio_sample=0.1'),
        ({'learner__rows_per_microbatch': 2, 'cluster__engines': '1 x tensor=1'}, None),
        ({'learner__rows_per_microbatch': 2, 'cluster__engines': '2 x tensor=3'}, 'are the only split'),
    ],
)
def test_what_keeps_its_devices_is_refused_by_name(fields, message):
    if message is None:
        validate(moving(**fields))  # one device less for the learner
        return
    with pytest.raises(ConfigError, match=message):
        validate(moving(**fields))


def test_servers_are_refused():
    fields = {'rollout__server': 'own', 'publication__channel': 'files', 'run__clock': 'real'}
    with pytest.raises(ConfigError, match='servers keep their devices, only rollout'):
        validate(moving(**fields))
