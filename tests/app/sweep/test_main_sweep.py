"""The command as its user meets it, on toy arms: failure, resuming, signals, refusals, and the table."""

import csv
import signal
import subprocess
import time

import pytest

from areal_jax.app.sweep import arms as arms_of
from areal_jax.app.sweep import sweep_page
from tests.app.sweep.toy_sweep import PROGRAM, ROOT, TOY, ToySweep
from tests.tasks.process_table import all_end
from tests.telemetry.test_bar import read_all, show, start_on_terminal

GRID = {f'eta{eta}_seed{seed}': {'staleness.eta': eta, 'run.seed': seed} for eta in (0, 4) for seed in range(3)}
FEW = {name: GRID[name] for name in list(GRID)[:3]}


def table(sweep):
    return list(csv.DictReader((sweep.workdir / 'results.csv').open()))


def contents(directory):
    """Every file below with its bytes."""
    return {path: path.read_bytes() for path in directory.rglob('*') if path.is_file()}


def wait_for(condition, process):
    end = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def pids(sweep, arms):
    return [int(line.split()[1]) for arm in arms for line in sweep.notes(arm) if line.startswith('start')]


def test_all_arms_run_once_and_the_table_has_means_and_paired_differences(tmp_path, monkeypatch, capsys):
    sweep, drawn, write = ToySweep(tmp_path, GRID), [], sweep_page.write_plots
    monkeypatch.setattr(sweep_page, 'write_plots', lambda *given: drawn.extend(write(*given)) or drawn)
    assert sweep.run(monkeypatch, '--jobs=3', draws=True) == 0
    assert all(len(pids(sweep, [name])) == 1 for name in GRID)
    rows = table(sweep)
    assert [row['arm'] for row in rows if row['row'] == 'arm'] == list(GRID)
    [row] = [row for row in rows if row['arm'] == 'eta4_seed2']
    rate = 2e-5
    assert (row['state'], row['updates'], row['seed'], row['staleness.eta']) == ('finished', '4', '2', '4')
    assert float(row['reward_last']) == pytest.approx(rate + 0.02 + 4 * 4 / 1000)
    [mean] = [row for row in rows if (row['row'], row['group']) == ('mean', 'eta4')]
    assert mean['seeds'] == '3'
    assert float(mean['reward_last']) == pytest.approx(rate + 0.01 + 0.016)
    differences = list(csv.DictReader((sweep.workdir / 'differences.csv').open()))
    [found] = [row for row in differences if row['endpoint'] == 'reward_last']
    assert (found['baseline'], found['group'], found['seeds']) == ('eta0', 'eta4', '3')
    assert float(found['difference']) == pytest.approx(0.016)
    assert float(found['r']) == pytest.approx(1.0)
    page = (sweep.workdir / 'results.md').read_text()
    assert '6 arms, of which 6 have finished; 2 groups' in page
    assert 'Arms that have not finished' not in page
    assert {'plots/reward.png', 'plots/endpoints.png'} <= {
        str(path.relative_to(sweep.workdir)) for path in sweep.workdir.rglob('*.png')
    }
    # once more: nothing runs again, and the table is made again; the same pictures, which are not drawn again here
    monkeypatch.setattr(sweep_page, 'write_plots', lambda *given: drawn)
    monkeypatch.setattr(sweep_page, 'render_html', lambda results: '')
    (sweep.workdir / 'results.md').unlink()
    assert sweep.run(monkeypatch, draws=True) == 0
    assert (sweep.workdir / 'results.md').read_text() == page
    assert all(len(pids(sweep, [name])) == 1 for name in GRID)


def test_a_terminal_has_a_bar_and_at_the_end_outcome_page_and_next_command(tmp_path):
    sweep = ToySweep(tmp_path, {'eta0_seed0': {'staleness.eta': 0}, 'eta4_seed0': {'staleness.eta': 4}})
    program = f'import os, sys\nos.chdir({str(ROOT)!r})\nsys.argv = {sweep.argv()!r}\n{PROGRAM}'
    child, terminal = start_on_terminal(program, PAUSE_S='0.3')
    content = read_all(terminal)
    assert child.wait() == 0
    assert '1 of 2 arms' in content
    *_, arms, outcome, first, second, page, following = [line for line in show(content) if line]
    assert arms.split() == ['arms', '2', 'of', '2', 'finished']
    assert outcome.split()[:2] == ['outcome', 'reward_last,']
    assert [line.split()[0] for line in (first, second)] == ['eta0:', 'eta4:']
    assert page.split() == ['report', str(sweep.workdir / 'results.md')]
    assert following.endswith(f'areal-report --compare {sweep.workdir}/eta0_seed0 {sweep.workdir}/eta4_seed0')


@pytest.mark.parametrize('named', ['', '/tmp/of/the/user'])
def test_arms_share_compiled_programs_in_the_workdir_or_where_the_environment_says(tmp_path, monkeypatch, named):
    sweep = ToySweep(tmp_path, {name: FEW[name] for name in list(FEW)[:2]})
    monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR', raising=False)
    if named:
        monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', named)
    assert sweep.run(monkeypatch) == 0
    noted = {line for arm in sweep.arms() for line in sweep.notes(arm.name) if line.startswith('compiled')}
    assert noted == {f'compiled {named or sweep.workdir / arms_of.COMPILED}'}


def test_one_bad_arm_does_not_end_the_others_and_is_named(tmp_path, monkeypatch, capsys):
    arms = {'bad': {'optimizer.learning_rate': 0.5}, 'good': {}, 'lazy': {'optimizer.learning_rate': 0.25}}
    sweep = ToySweep(tmp_path, arms)
    assert sweep.run(monkeypatch) == 2
    printed = capsys.readouterr()
    reason = 'with code 2: optimizer.learning_rate=0.5 is refused by the toy'
    assert f'error: 1 of 3 arms has not finished: bad ({reason})' in printed.err
    rows = {row['arm']: row for row in table(sweep) if row['row'] == 'arm'}
    assert [rows[name]['state'] for name in arms] == ['unfinished', 'finished', 'finished']
    assert rows['bad']['reason'] == reason
    assert rows['bad']['reward_last'] == ''
    assert 'no optimizer step' in rows['lazy']['reason']
    page = (sweep.workdir / 'results.md').read_text()
    assert f'| bad | unfinished | 0 of 4 | {reason} |' in page
    # the arm is mended: it alone runs
    sweep.write(arms | {'bad': {'optimizer.learning_rate': 0.4}})
    assert sweep.run(monkeypatch) == 3  # the lazy one trained nothing
    assert [len(pids(sweep, [name])) for name in arms] == [2, 1, 1]


def test_an_arm_that_a_signal_ends_goes_on(tmp_path, monkeypatch):
    sweep = ToySweep(tmp_path, {'mortal': {'optimizer.learning_rate': 0.125}, 'other': {}})
    assert sweep.run(monkeypatch) == 0
    assert sweep.updates('mortal') == [1, 2, 3, 4]
    assert [line.split()[-1] for line in sweep.notes('mortal') if line.startswith('start')] == [
        'resume=False',
        'resume=True',
    ]


def test_no_more_arms_run_than_jobs_and_as_many(tmp_path):
    sweep = ToySweep(tmp_path, FEW)
    process = sweep.start('--jobs=2', MEET='2')
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    times = lambda name, word, place: next(
        float(line.split()[place]) for line in sweep.notes(name) if line.startswith(word)
    )
    spans = [(times(name, 'start', 2), times(name, 'end', 1)) for name in FEW]
    running = [sum(start <= moment < end for start, end in spans) for moment, _ in spans]
    assert max(running) == 2


@pytest.mark.parametrize('number', [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_stop_signal_ends_all_arms_with_their_state_saved(tmp_path, number):
    sweep = ToySweep(tmp_path, FEW, steps=1000)
    process = sweep.start('--jobs=2', pause_s=0.05)
    wait_for(lambda: all(sweep.updates(name) for name in list(FEW)[:2]), process)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert 'the arms finish the update under way, then save' in output
    assert 'the same command goes on' in output
    assert '--resume' not in output
    for name in list(FEW)[:2]:
        assert sweep.notes(name)[-1].startswith('saved')
        assert any((sweep.workdir / name / 'checkpoints').iterdir())
    assert not any(sweep.notes(name) for name in list(FEW)[2:])  # none is started after the signal
    page = (sweep.workdir / 'results.md').read_text()
    assert page.count('| it was stopped |') == 2
    assert page.count('| not started | 0 of 1000 |') == 1
    assert all_end(pids(sweep, GRID), within_s=0.0)


def test_a_second_signal_ends_everything_at_once(tmp_path):
    sweep = ToySweep(tmp_path, GRID, steps=1000)
    process = sweep.start('--jobs=2', pause_s=60.0)  # no arm can save in time
    wait_for(lambda: len(pids(sweep, GRID)) == 2, process)
    process.send_signal(signal.SIGTERM)
    assert any('the arms finish the update under way' in line for line in process.stdout)  # it has seen the first
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=50)
    assert process.returncode == 75
    assert all_end(pids(sweep, GRID), within_s=60)


def test_kill_9_of_the_sweep_leaves_no_orphan_and_the_same_command_goes_on(tmp_path):
    sweep = ToySweep(tmp_path, FEW, steps=40)
    first, _, third = FEW
    process = sweep.start('--jobs=2', HOLD=third)
    wait_for(lambda: (sweep.workdir / first / 'report.json').exists() and len(sweep.updates(third)) == 4, process)
    process.kill()
    process.communicate()
    assert all_end(pids(sweep, FEW), within_s=60)
    assert sweep.updates(third) == [1, 2, 3, 4]
    process = sweep.start('--jobs=2')
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert f'{third} goes on' in output
    assert f' {first} ' not in output
    assert all(sweep.updates(name) == list(range(1, 41)) for name in FEW)
    assert len(pids(sweep, [first])) == 1
    assert len(table(sweep)) == len(FEW) + 3


def test_a_dry_run_prints_a_command_a_line_and_writes_nothing(tmp_path, monkeypatch, capsys):
    sweep = ToySweep(tmp_path, GRID)
    assert sweep.run(monkeypatch, '--dry_run') == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(GRID)
    assert all(f'--workdir={sweep.workdir / name}' in line for name, line in zip(GRID, lines, strict=True))
    assert all('--resume' not in line for line in lines)
    assert not sweep.workdir.exists()


def test_only_runs_what_it_names_and_pairs_the_seeds_that_both_groups_have(tmp_path, monkeypatch, capsys):
    sweep = ToySweep(tmp_path, GRID)
    assert sweep.run(monkeypatch, '--only=eta0_seed[01],eta4_seed[12]') == 0
    assert [name for name in GRID if sweep.notes(name)] == ['eta0_seed0', 'eta0_seed1', 'eta4_seed1', 'eta4_seed2']
    rows = [row for row in table(sweep) if row['row'] == 'arm']
    assert [row['arm'] for row in rows if row['state'] == 'not started'] == ['eta0_seed2', 'eta4_seed0']
    assert '| eta4 | 2 of 3 |' in (sweep.workdir / 'results.md').read_text()
    differences = list(csv.DictReader((sweep.workdir / 'differences.csv').open()))
    [found] = [row for row in differences if row['endpoint'] == 'reward_last']
    assert (found['seeds'], found['t_low']) == ('1', '')
    assert float(found['difference']) == pytest.approx(0.016)  # of seed 1, not of the means
    capsys.readouterr()
    assert sweep.run(monkeypatch, '--dry_run') == 0
    assert len(capsys.readouterr().out.splitlines()) == 2  # finished arms have no command


REFUSED = {
    'a bad arm': (GRID | {'bad': {'staleness.eta': -1}}, "arm 'bad': staleness.eta=-1.0 must be at least 0"),
    'a changed arm': (
        GRID | {'eta0_seed0': {'staleness.eta': 2, 'run.seed': 0}},
        'was begun with staleness.eta=0.0, and the sweep sets 2.0; set it back, or give another --workdir',
    ),
    'another sweep': ({'new': {}}, "whose arm 'eta0_seed0' is not one of"),
}


def test_a_sweep_that_may_not_go_on_is_refused_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    sweep = ToySweep(tmp_path, GRID)
    assert sweep.run(monkeypatch, '--only=eta0_seed0') == 0
    before = contents(sweep.workdir)
    for arms, message in REFUSED.values():
        sweep.write(arms)
        for words in (['--dry_run'], []):
            capsys.readouterr()
            assert sweep.run(monkeypatch, *words) == 2
            errors = capsys.readouterr().err.splitlines()
            assert len(errors) == 1
            assert message in errors[0]
            assert contents(sweep.workdir) == before


def test_a_directory_of_something_else_is_refused(tmp_path, monkeypatch, capsys):
    sweep = ToySweep(tmp_path, GRID)
    sweep.workdir.mkdir()
    (sweep.workdir / 'thesis.tex').write_text('x')
    assert sweep.run(monkeypatch) == 2
    assert 'holds thesis.tex and no sweep.json, so it is no sweep; give another --workdir' in capsys.readouterr().err
    assert contents(sweep.workdir) == {sweep.workdir / 'thesis.tex': b'x'}


def test_arms_that_were_started_one_by_one_are_of_the_sweep(tmp_path, monkeypatch):
    sweep = ToySweep(tmp_path, {'a': {}, 'b': {}})
    monkeypatch.setattr(arms_of, 'TRAINER', TOY)
    monkeypatch.chdir(ROOT)
    for arm in sweep.arms():
        subprocess.run(arm.command(resume=False), check=True)
    assert sweep.run(monkeypatch) == 0
    assert [len(pids(sweep, [name])) for name in 'ab'] == [1, 1]
    assert [row['state'] for row in table(sweep) if row['row'] == 'arm'] == ['finished'] * 2


def test_more_arms_and_more_updates_may_be_added(tmp_path, monkeypatch):
    sweep = ToySweep(tmp_path, {'a': {}})
    assert sweep.run(monkeypatch) == 0
    sweep.write({'a': {}, 'b': {'run.seed': 3}}, steps=6)
    assert sweep.run(monkeypatch, '--jobs=2') == 0
    assert all(sweep.updates(name) == [1, 2, 3, 4, 5, 6] for name in 'ab')


def test_a_damaged_arm_is_listed_with_its_file(tmp_path, monkeypatch, capsys):
    sweep = ToySweep(tmp_path, {'a': {}, 'b': {}})
    assert sweep.run(monkeypatch) == 0
    (sweep.workdir / 'a' / 'metrics.jsonl').write_text('{"step": 1}\n{"step": 3}\n')
    assert sweep.run(monkeypatch) == 2
    assert 'line 2 is of update 3' in capsys.readouterr().err
    rows = {row['arm']: row for row in table(sweep) if row['row'] == 'arm'}
    assert rows['b']['state'] == 'finished'
    assert 'metrics.jsonl' in rows['a']['reason']


def test_two_sweeps_of_one_directory_are_refused(tmp_path):
    sweep = ToySweep(tmp_path, GRID, steps=1000)
    process = sweep.start(pause_s=0.05)
    wait_for(lambda: sweep.updates('eta0_seed0'), process)
    other = sweep.start()
    _, errors = other.communicate(timeout=60)
    process.terminate()
    process.communicate(timeout=60)
    assert other.returncode == 2
    assert f'is in use by process {process.pid} on' in errors


@pytest.mark.parametrize(
    'words', [['--jobs=0'], ['--jobs=two'], ['--only=nobody'], ['--config.run.stepz=3'], ['--job=2']]
)
def test_a_wrong_flag_is_one_sentence(tmp_path, monkeypatch, capsys, words):
    sweep = ToySweep(tmp_path, {'a': {}})
    assert sweep.run(monkeypatch, *words) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert words[0].partition('=')[0].removeprefix('--config.') in errors[0]
    assert not sweep.workdir.exists()
