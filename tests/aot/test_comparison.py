"""Two sides of a comparison: the other command line, and the numbers that are compared."""

import pytest

from areal_jax.aot import hlo
from areal_jax.aot.comparison import GIVEN, Side, change_words, compare, covered_a_layer, measure, render_comparison
from areal_jax.aot.findings import Finding, Memory
from areal_jax.aot.programs import LEARNER
from areal_jax.errors import UserError

WORDS = [
    'areal-aot',
    '--config=a.py',
    '--topology',
    'four',
    '--compare',
    'cluster.xla_flags=off',
    '--config.run.seed=1',
]


@pytest.mark.parametrize(('changes', 'added'), [
    (['cluster.xla_flags=off'], ['--config.cluster.xla_flags=off']),
    (['--config.cluster.xla_flags=xla_a=1 xla_b=2'], ['--config.cluster.xla_flags=xla_a=1 xla_b=2']),
    (['run.seed=2', 'task.options.digits=3'], ['--config.run.seed=2', '--config.task.options.digits=3']),
])  # fmt: skip
def test_fields_come_last_so_that_they_win(changes, added):
    kept = ['areal-aot', '--config=a.py', '--topology', 'four', '--config.run.seed=1']
    assert change_words(WORDS, changes) == [*kept, *added]


def test_a_file_takes_the_place_of_the_config_and_keeps_its_changes():
    kept = ['areal-aot', '--topology', 'four', '--config.run.seed=1']
    assert change_words(WORDS, ['b.py:big=1', 'run.steps=3']) == [*kept, '--config=b.py:big=1', '--config.run.steps=3']
    with pytest.raises(UserError, match=r'--compare=b.py --compare=c.py: name one config file'):
        change_words(WORDS, ['b.py', 'c.py'])


def finding(temporaries, *covers):
    collectives = [
        hlo.Collective('reduce-scatter', 'fsdp', 'f32[2]', 100, 6, ''),
        hlo.Collective('reduce-scatter', 'fsdp', 'f32[1]', 50, 2, ''),
    ]
    memory = Memory(4, 1, temporaries, temporaries + 5, 3)
    return Finding(
        LEARNER, 'apply', 1.0, memory=memory, device_bytes=1e6, collectives=collectives, covers=covers, floor_s=0.25,
        copies=[hlo.Buffer('f32[9]', 36, 2, '')],
    )  # fmt: skip


def test_kernels_of_a_layer_are_those_of_all_passes_by_all_layers():
    cover = lambda kind, kernels, times: hlo.Cover(kind, 2, 100, kernels, times)
    of_two_layers = finding(
        9, cover('reduce-scatter', 14, 17), cover('reduce-scatter', 5, 1), cover('all-gather', 9, 17)
    )
    assert covered_a_layer(of_two_layers, 'reduce-scatter', 36) == 14 * 17 / 36  # what is not in a loop is left out
    assert covered_a_layer(of_two_layers, 'all-to-all', 36) == 0


def test_bytes_are_those_of_all_exchanges_of_a_kind():
    measured = measure(finding(9, hlo.Cover('reduce-scatter', 2, 100, 3, 4)), 2)
    assert measured == {
        'temporaries': 9, 'peak': 14, 'reduce-scatter': 700, 'kernels during reduce-scatters, a layer': 6.0,
        'copies': 72, 'least seconds': 0.25,
    }  # fmt: skip


def test_programs_are_matched_by_name_and_what_one_side_lacks_is_a_dash():
    refused = Finding(LEARNER, 'apply', 1.0, refusal='no room')
    alone = Finding(LEARNER, 'export', 1.0, memory=Memory(4, 1, 2 * 10**6, 7, 0), device_bytes=1e6)
    sides = [
        Side(name, 2, 9, {}, {}, [], list(found))
        for name, found in ((GIVEN, [finding(9 * 10**6)]), ('b', [refused, alone]))
    ]
    assert list(compare(sides)) == ['learner: apply', 'learner: export']
    assert compare(sides)['learner: apply']['b'] == {'refused': 'no room'}
    lines = render_comparison(sides).splitlines()
    assert lines[0].split() == ['as', 'given', 'b']
    assert lines[2].split() == ['temporaries', '9', 'MB', '-']
    assert ['refused', '-', 'no', 'room'] in [line.split() for line in lines]
    assert lines[-4].split() == ['temporaries', '-', '2', 'MB']
