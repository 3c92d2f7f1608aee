"""Parts fail, hang and run out of time by themselves; packages and wheels; the table."""

import dataclasses
import json
import sys
import zipfile

import jax.monitoring
import pytest

from areal_jax.app.parts.compilations import EVENT
from areal_jax.models.decoder import Decoder
from benchmarks import gpu
from benchmarks.gpu_parts import packages, summary
from benchmarks.gpu_parts.cells import run_part
from benchmarks.gpu_parts.compile import Compilations
from benchmarks.gpu_parts.decode import SEED, Decoding
from benchmarks.gpu_parts.parts import FAILED, LEFT_OUT, RAN, TIMED_OUT, Part, run_parts
from benchmarks.gpu_parts.plans import PLANS, make_parts
from benchmarks.gpu_parts.shapes import TINY, DecodeCase
from benchmarks.gpu_parts.tests import Found

CELLS = {'first': lambda: 1, 'second': lambda: {}['kernel'], 'third': lambda: 3}
WRITE = 'import json, sys; json.dump({"x": 1}, open(sys.argv[-1], "w"));'


def part(name, code, limit_s=20.0, least_s=0.0, **more):
    return Part(name, [sys.executable, '-c', code], limit_s, least_s, **more)


def run(*parts, seconds=60.0):
    return run_parts(parts, seconds, lambda name, result: None)


def test_a_part_that_fails_or_hangs_leaves_its_numbers_and_the_others_run():
    results = run(
        part('fails', WRITE + 'sys.exit("no kernel")'),
        part('hangs', WRITE + 'import time; time.sleep(60)', limit_s=1.0),
        part('silent', 'pass'),
        part('runs', WRITE),
        part('late', WRITE, least_s=1e6),
    )
    assert {name: result['status'] for name, result in results.items()} == {
        'fails': FAILED, 'hangs': TIMED_OUT, 'silent': FAILED, 'runs': RAN, 'late': LEFT_OUT,
    }  # fmt: skip
    assert results['fails']['numbers'] == results['hangs']['numbers'] == results['runs']['numbers'] == {'x': 1}
    assert results['fails']['error'] == 'no kernel'
    assert results['hangs']['seconds'] < 30
    assert 'no numbers' in results['silent']['error']
    lines = [summary.part_line(name, result) for name, result in results.items()]
    assert lines[0].startswith('fails: failed after ')
    assert lines[-1].startswith('late: left out: ')
    assert 'late            left out' in summary.table(results)


def test_flags_that_xla_does_not_know_are_left_out():
    fatal = 'import os; assert "--xla_old" not in os.environ["XLA_FLAGS"], "Unknown flag in XLA_FLAGS: --xla_old";'
    [result] = run(part('flags', fatal + WRITE, flags='--xla_old=1')).values()
    assert (result['status'], result['flags_left_out']) == (RAN, '--xla_old=1')


def test_packages_that_are_missing_or_old_are_named(monkeypatch):
    assert packages.find_missing() == []
    assert packages.find_missing(['jax', 'no-such-package']) == ['no-such-package']
    monkeypatch.setattr(packages, 'least_versions', lambda: {'flax': '99.1'})
    [old] = packages.find_missing(['flax'])
    assert old.startswith('flax>=99.1 (0.')


def test_wheels_are_unpacked_with_their_data(tmp_path):
    with zipfile.ZipFile(tmp_path / 'thing-1-py3-none-any.whl', 'w') as wheel:
        wheel.writestr('thing/__init__.py', 'x = 1')
        wheel.writestr('thing-1.data/purelib/other.py', 'y = 2')
    packages.unpack_wheels(tmp_path, tmp_path / 'site')
    assert (tmp_path / 'site' / 'thing' / '__init__.py').read_text() == 'x = 1'
    assert (tmp_path / 'site' / 'other.py').read_text() == 'y = 2'


@pytest.mark.parametrize(
    'arguments', [['--parts=train_7b'], ['--minutes=0'], ['--seed=-1'], ['--plan=all'], ['--wheels=/no/such']]
)
def test_bad_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as refused:
        gpu.main(['--json=out.json', *arguments])
    assert refused.value.code == 2
    assert arguments[0].partition('=')[0] in capsys.readouterr().err


def test_missing_packages_are_one_sentence(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(packages, 'find_missing', lambda: ['flax', 'optax'])
    monkeypatch.setattr(gpu.os, 'environ', dict(gpu.os.environ))
    assert gpu.main([f'--json={tmp_path}/out.json']) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert 'lacks flax, optax; put a folder' in line
    assert not list(tmp_path.iterdir())


def test_large_shapes_are_refused_without_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, 'argv', ['part', '3b', str(tmp_path / 'out.json')])
    with pytest.raises(SystemExit, match=r'the default device is a cpu: use .*cuda13.*, or --tiny'):
        run_part(lambda *_, **__: pytest.fail('it was measured'))
    monkeypatch.setattr(sys, 'argv', ['part', '3b', '--tiny', str(tmp_path / 'out.json')])
    run_part(lambda cells, shape, tiny: cells.add('shape', [shape, tiny]))
    assert json.loads((tmp_path / 'out.json').read_text()) == {'shape': ['3b', True], 'device_memory': None}


def test_a_cell_that_fails_is_kept_with_its_error_and_fails_the_part(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, 'argv', ['part', '--tiny', str(tmp_path / 'out.json')])
    with pytest.raises(SystemExit, match='failed: second'):
        run_part(lambda cells, tiny: [cells.attempt(name, value) for name, value in CELLS.items()])
    cells = json.loads((tmp_path / 'out.json').read_text())
    assert cells == {'first': 1, 'second': {'error': "KeyError: 'kernel'"}, 'third': 3} | {'device_memory': None}


def test_what_pytest_found_is_written_after_every_test(tmp_path):
    test = tmp_path / 'test_a.py'
    test.write_text(
        'import pathlib, pytest\n'
        'def test_one(): pass\n'
        "def test_two(): assert 'test_one' in pathlib.Path(__file__).with_name('out.json').read_text(), 'not yet'\n"
        "def test_three(): raise ValueError('wrong')\n"
        "def test_four(): pytest.skip('no GPU')\n"
    )
    found = Found(tmp_path / 'out.json')
    pytest.main(['-q', str(test), '-p', 'no:cacheprovider', '-p', 'no:xdist'], plugins=[found])
    numbers = json.loads((tmp_path / 'out.json').read_text())
    assert numbers == found.numbers()
    assert numbers['passed'] == 2
    [failed], [skipped] = numbers['failed'], numbers['skipped']
    assert failed['name'].endswith('test_three')
    assert 'wrong' in failed['message']
    assert skipped['name'].endswith('test_four')
    assert len(numbers['slowest_s']) == 4


def test_what_is_rebuilt_fits_the_context_however_often_the_last_dispatch_is_repeated():
    model = dataclasses.replace(TINY, vocab_size=32, n_layers=1)
    case = DecodeCase(
        model, slots=2, context_tokens=64, prompt_tokens=45, new_tokens=16, decode_steps=8, prefill_tokens=64
    )
    decoding = Decoding(case, Decoder(case.model).init(SEED), 'float32')
    decoding.prefill()
    while decoding.generated < case.new_tokens:
        decoding.step()
    tokens = decoding.rebuild()
    assert tokens == case.slots * (case.prompt_tokens + case.new_tokens - 1)
    for _ in range(3):
        decoding.repeat()
    assert decoding.generated == case.new_tokens
    assert decoding.rebuild() == tokens


def test_seconds_of_compilations_are_summed_and_those_at_once_are_covered_once():
    with Compilations() as compilations:
        for name, seconds in ((EVENT, 3.0), (EVENT, 2.0), ('/jax/other', 9.0)):
            jax.monitoring.record_event_duration_secs(name, seconds)
    jax.monitoring.record_event_duration_secs(EVENT, 9.0)
    numbers = compilations.numbers()
    assert numbers['programs'] == 2
    assert (numbers['summed_s'], numbers['longest_s']) == (pytest.approx(5.0), pytest.approx(3.0))
    assert numbers['covered_s'] == pytest.approx(3.0, abs=0.5)  # the shorter one lies inside of the longer one


def test_plans_name_all_parts_and_leave_time_for_both_schedules():
    parts = make_parts(tiny=False)
    assert {name for plan in PLANS.values() for name in plan.parts} == set(parts)
    for plan in PLANS.values():
        assert len(set(plan.parts)) == len(plan.parts)
    plan, needed = PLANS['measure'], 0.0
    for name in plan.parts[: plan.parts.index('schedules_async')]:
        needed += parts[name].limit_s
    assert needed + parts['schedules_async'].least_s < 60 * plan.minutes


def test_the_ratio_of_the_schedules_needs_both():
    results = {'schedules_sync': {'numbers': {'rate': {'tokens_per_second': 100.0}}}}
    assert summary.compare_schedules(results) is None
    results['schedules_async'] = {'numbers': None}
    assert summary.compare_schedules(results) is None
    results['schedules_async'] = {'numbers': {'rate': {'tokens_per_second': 140.0}}}
    assert summary.compare_schedules(results) == {'sync': 100.0, 'async': 140.0, 'ratio': 1.4}
