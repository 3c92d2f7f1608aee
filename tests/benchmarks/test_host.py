"""benchmarks/host.py: what it makes of times between looks, of answers in pieces, of a missed bar; two sides once."""

import json
import pathlib

import numpy as np
import pytest

from areal_jax.app.workdir.environment import git_commit
from areal_jax.errors import UserError
from benchmarks import host
from benchmarks.host import SHAPES, registry_operations, split_costs
from benchmarks.side_host import describe_lag, measure_loop
from benchmarks.side_registry import measure_registry


def test_a_completion_waits_for_the_end_of_the_spell_in_which_it_comes():
    """One spell of 10 s among 90 of 1 s: of 100 s of busy time, 1 s is left to wait for more than 9 s."""
    lag = describe_lag([1.0] * 90 + [10.0])
    assert lag['lag_ms_max'] == 10_000
    assert lag['lag_ms_p99'] == pytest.approx(9_000)


def test_the_share_of_longer_waits_is_one_in_a_hundred():
    spells = np.random.default_rng(0).exponential(1.0, 5_000)
    limit_s = describe_lag(list(spells))['lag_ms_p99'] / 1e3
    longer_s = np.maximum(spells - limit_s, 0).sum()
    assert longer_s == pytest.approx(0.01 * spells.sum())


def test_the_costs_of_an_answer_are_found_again():
    answer, piece, token = 700.0, 90.0, 2.5
    shapes = [(pieces, tokens) for pieces, tokens, _ in SHAPES.values()]
    costs = [answer + pieces * (piece + tokens * token) for pieces, tokens in shapes]
    assert list(split_costs(shapes, costs).values()) == pytest.approx([answer, piece, token])


def test_operations_on_the_registry():
    """3 heartbeats; two looks, each with a listing, 3 times and 3 contents."""
    assert registry_operations(3, looks_a_s=2.0) == 3 + 2 * (1 + 6)


@pytest.mark.parametrize('pool', ['in_process', 'servers'])
def test_the_loop_is_measured_from_the_first_update_on(pool, tmp_path: pathlib.Path):
    checks = measure_loop(pool, engines=4, open_each=8, seconds=0.0, path=tmp_path / 'events.jsonl')
    assert checks['tokens'] == 2 * 64  # two updates of 8 groups of 8
    whole = (tmp_path / 'events.jsonl').stat().st_size
    assert 200 < checks['log_bytes'] < whole / checks['tokens']
    assert 0 < checks['lag_ms_p99'] <= checks['lag_ms_max']


def test_the_registry_is_read_while_hearts_beat():
    checks = measure_registry(engines=20, looks=1)
    assert 0 < checks['look_cpu_s'] < 1
    assert 0 <= checks['beat_cpu_s'] < checks['start_cpu_s']


@pytest.mark.parametrize(('met', 'code'), [(True, 0), (False, 2)])
def test_a_missed_bar_is_seen_in_the_exit_code(met, code, monkeypatch):
    rows = {'loop': lambda options: iter([{'row': 'growth', 'met': met}, {'row': 'loop'}])}
    monkeypatch.setattr(host, 'ROWS', rows)
    monkeypatch.setattr(host, 'report', lambda name, arguments, options, measure: {'rows': measure()})
    assert host.main(['--rows=loop']) == code


@pytest.mark.parametrize('sizes', ['64', '64,many', '16,64'])
def test_sizes_that_cannot_be_are_refused(sizes):
    with pytest.raises(UserError, match='engines'):
        host.read_options([f'--engines={sizes}'])


def test_kept_rows_are_of_the_same_commit_and_of_other_names(tmp_path):
    out = tmp_path / 'host.json'
    options = host.read_options(['--rows=loop', '--keep', f'--out={out}'])
    assert host.kept_rows(options) == []
    rows = [{'row': 'loop'}, {'row': 'growth'}, {'row': 'wire'}]
    out.write_text(json.dumps({'rows': rows, 'commit': git_commit()}))
    assert host.kept_rows(options) == [{'row': 'wire'}]
    out.write_text(json.dumps({'rows': rows, 'commit': 'another'}))
    with pytest.raises(UserError, match='another'):
        host.kept_rows(options)
