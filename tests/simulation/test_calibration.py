"""Prices that a simulated log was made with are found in it again, lanes that share cores included."""

from __future__ import annotations

import pytest

from areal_jax.app.simulate.simulated_site import build_simulation
from areal_jax.config.fields import ConfigError
from areal_jax.report.event_log import load_events
from areal_jax.simulation.calibration import Table, calibrate, read_gaps, read_table, write_table
from areal_jax.simulation.simulated_clock import Contention
from areal_jax.types import Work
from tests.app.small import small_config

PRICES = {
    'decode': {'base': 0.03, 'steps': 0.02, 'row_steps': 0.004, 'positions': 0.0002},
    'prefill': {'base': 0.01, 'bucket': 0.0001, 'tokens': 0.002},
    'train': {'base': 0.5, 'tokens': 0.001},
    **{kind: {'base': 0.2} for kind in ('snapshot', 'publish', 'load', 'reward', 'save', 'compile')},
}


def simulate(workdir, table, **fields):
    write_table(table, workdir / 'prices.json')
    config = small_config(**{
        'simulation__prices': str(workdir / 'prices.json'), 'simulation__answers': 'lognormal(30, 0.75)',
        'simulation__prompts': 'uniform(4, 20)', 'rollout__context_tokens': 128, 'rollout__max_new_tokens': 90,
        'rollout__prefill_buckets': (32, 256), 'learner__row_tokens': 128, 'learner__row_loss_tokens': 128,
        'learner__filter_equal_rewards': False, 'run__steps': 8, 'staleness__eta': 2.0, 'simulation__join': False,
        **fields,
    })  # fmt: skip
    build_simulation(config, workdir / 'run').train()
    return load_events(workdir / 'run' / 'events.jsonl')


@pytest.mark.parametrize('contention', [Contention(), Contention(2.5, 2.5), Contention(1.0, 12.0)])
def test_prices_and_contention_are_found_in_the_log_that_they_made(tmp_path, contention):
    table = Table(PRICES, contention, {}, {}, ())
    other = tmp_path / 'other'
    other.mkdir()
    logs = [('a', simulate(tmp_path, table)), ('b', simulate(other, table, rollout__slots=4))]
    found = calibrate(logs)
    assert found.contention.learner == pytest.approx(contention.learner, rel=0.03)
    assert found.contention.engines == pytest.approx(contention.engines, rel=0.03)
    for kind in PRICES:
        if kind in found.residuals and kind != 'compile':
            assert found.residuals[kind]['median_error'] < 0.02, kind
            assert found.residuals[kind]['total'] == pytest.approx(1, abs=0.02)
    decode = found.prices['decode']  # all dispatches have two steps, so their sum alone shows
    assert decode['base'] + 2 * decode['steps'] == pytest.approx(0.03 + 2 * 0.02, rel=0.1)
    assert found.prices['train']['tokens'] == pytest.approx(0.001, rel=0.05)
    assert (found.runs, found.residuals['train']['n']) == (('a', 'b'), 16)


def test_the_price_of_several_steps_is_the_sum_of_their_prices():
    price = Table(PRICES, Contention(), {}, {}, ()).by_kind()['decode']
    once = [price('engine/0', Work('decode', 1, size={'rows': 3, 'positions': 50 + 3 * step})) for step in range(4)]
    together = price('engine/0', Work('decode', 4, size={'rows': 3, 'positions': 50}))
    assert together == pytest.approx(sum(once) - 3 * PRICES['decode']['base'])


def test_a_table_is_read_as_it_was_written(tmp_path):
    table = Table(PRICES, Contention(1.5, 3.0), {'decode': 0.1}, {'decode': {'n': 2}}, ('a',))
    write_table(table, tmp_path / 'prices.json')
    assert read_table(tmp_path / 'prices.json') == table
    (tmp_path / 'other.json').write_text('{"format": 0}')
    with pytest.raises(ConfigError, match='is no table of prices of format 2'):
        read_table(tmp_path / 'other.json')


def test_the_host_takes_its_time_for_a_completion_and_is_found_in_the_gaps(tmp_path):
    events = simulate(tmp_path, Table(PRICES, Contention(), {'decode': 0.05}, {}, ()), run__steps=3)
    assert calibrate([('a', events)]).host['decode'] == pytest.approx(0.05)
    assert min(gap for kind, gap in read_gaps(events) if kind == 'decode') == pytest.approx(0.05)


def test_one_point_is_no_line(tmp_path):
    events = simulate(tmp_path, Table(PRICES, Contention(), {}, {}, ()), run__steps=1)
    with pytest.raises(ConfigError, match="have 1 pieces of the work 'train', and a price needs 2"):
        calibrate([('a', events)])
