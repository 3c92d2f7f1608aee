"""Simulated runs against closed forms: steps cost the same whatever they decode, so every batch takes equally long."""

from __future__ import annotations

import itertools

import pytest

from areal_jax.config.drawn_lengths import parse_lengths
from areal_jax.simulation.closed_forms import (
    age_of_sawtooth,
    group_age,
    idle_shares,
    mean_token_age,
    period_s,
    token_age,
    update_ends_s,
)
from areal_jax.simulation.drawn_answers import group_moments
from areal_jax.telemetry.metrics import read_metrics
from tests.app.simulate.test_simulated_run import read_events, simulate

STEP_S = 0.25
PROMPT, ANSWER, GROUP = 8, 8, 2
G = ANSWER * STEP_S  # seconds of a batch, which is one group: each has an engine to itself
TOKENS = PROMPT + GROUP * (ANSWER - 1)  # that an update reads: the prompt once, of each answer all but the last
SIMPLE = {
    'simulation__prices': 'virtual', 'simulation__prompts': f'constant({PROMPT})',
    'simulation__answers': f'constant({ANSWER})', 'virtual__decode_step_s': STEP_S, 'virtual__prefill_token_s': 0.0,
    'virtual__publish_s': 0.0, 'virtual__reward_s': 0.0, 'rollout__group_size': GROUP,
    'learner__groups_per_update': 1, 'learner__filter_equal_rewards': False, 'rollout__slots': GROUP,
    'rollout__decode_steps': 1, 'rollout__max_running_groups': 64, 'cluster__engines': '12 x tensor=1',
    'run__steps': 12,
}  # fmt: skip


def run(workdir, train_s=1.0, **fields):
    """(events, rows of metrics) of a run whose update takes so long."""
    simulate(workdir, **{**SIMPLE, 'virtual__train_token_s': train_s / TOKENS, **fields}).train()
    return read_events(workdir), read_metrics(workdir / 'metrics.jsonl')


def update_ends(events):
    return [event['time'] for event in events if event['kind'] == 'publish' and event['version'] > 0]


def busy_s(events, kind, low, high):
    """Lane seconds of the work between two times."""
    done = [
        (event['started'], event['seconds'])
        for event in events
        if event['kind'] == 'run_done' and event['work'] == kind
    ]
    return sum(max(0.0, min(start + seconds, high) - max(start, low)) for start, seconds in done)


@pytest.mark.parametrize(('eta', 'train_s'), [(0, 1.0), (1, 1.0), (2, 1.0), (1, 0.75), (2, 0.5), (3, 0.75)])
def test_the_period_is_that_of_the_eta_law(tmp_path, eta, train_s):
    """G = 2 s: with T = 1 s it is 3, 1.5, 1 s; e_k = max(e_{k-1}, e_{k-eta-1} + p + G) + T holds for every update.

    The gate knows a version when every engine uses it, and one that decodes takes it after the dispatch under way: p is
    at most one dispatch, and none where no engine decodes (eta 0) or the learner sets the pace.
    """
    events, _ = run(tmp_path, train_s, staleness__eta=float(eta))
    ends = update_ends(events)
    exact = eta == 0 or (G + train_s + STEP_S) / (eta + 1) <= train_s
    earliest, latest = (update_ends_s([G] * 12, train_s, p, eta) for p in (0.0, 0.0 if exact else STEP_S))
    assert all(low - 1e-6 <= end <= high + 1e-6 for low, end, high in zip(earliest, ends, latest, strict=True))
    turn = eta + 1
    period = (ends[-1] - ends[-1 - 2 * turn]) / (2 * turn)
    low, high = (period_s(G, train_s, p, eta) for p in (0.0, 0.0 if exact else STEP_S))
    assert low - 1e-6 <= period <= high + 1e-6


@pytest.mark.parametrize('train_s', [1.0, 0.25])
def test_the_oldest_token_is_as_old_as_eta_allows_whichever_side_is_slower(tmp_path, train_s):
    _, rows = run(tmp_path, train_s, staleness__eta=3.0)
    ages = [row['staleness/token_age_max'] for row in rows]
    assert ages == [group_age(3, update) for update in range(12)]


@pytest.mark.parametrize(('train_s', 'expected'), [(1.0, 3.5), (0.5, 2.5)])
def test_tokens_are_younger_than_groups_where_engines_take_new_weights_at_once(tmp_path, train_s, expected):
    """G / T = 2 and 4, eta 4: eta - (G / T - 1) / 2."""
    _, rows = run(tmp_path, train_s, staleness__eta=4.0)
    assert mean_token_age(4, G, train_s) == expected
    # weights that come with an admission are used from the second of 8 tokens on at the latest
    assert rows[-1]['staleness/token_age_mean'] == pytest.approx(expected, abs=1 / ANSWER)


@pytest.mark.parametrize('train_s', [0.5, 5.0])
def test_the_slowest_lane_sets_the_pace_and_the_others_are_idle(tmp_path, train_s):
    """One engine with slots for one batch: W = 2 s against T."""
    events, _ = run(tmp_path, train_s, cluster__engines='1 x tensor=1', staleness__eta=4.0, run__steps=16)
    ends = update_ends(events)
    low, high = ends[5], ends[9]
    period = max(G, train_s)
    assert (high - low) / 4 == pytest.approx(period, abs=1e-6)
    found = {
        'engines': 1 - busy_s(events, 'decode', low, high) / (high - low),
        'learner': 1 - busy_s(events, 'train', low, high) / (high - low),
    }
    assert found == pytest.approx(idle_shares({'engines': G, 'learner': train_s}), abs=1e-6)


def test_tokens_of_an_ungated_run_are_as_old_as_its_slots_and_groups_make_them(tmp_path):
    """16 slots, batches of 8 answers, rho = 0.5: C kappa / B + rho, with kappa of groups of 4."""
    lengths, mean, size = 'lognormal(24, 0.6)', 24, 4
    batch_s = 8 * mean * STEP_S / 16
    tokens = 2 * (PROMPT + size * (mean - 1))
    _, rows = run(
        tmp_path, staleness__eta=float('inf'), simulation__answers=lengths, rollout__group_size=size,
        learner__groups_per_update=2, rollout__slots=4, cluster__engines='4 x tensor=1', run__steps=80,
        rollout__max_running_groups=0, virtual__train_token_s=0.5 * batch_s / tokens,
    )  # fmt: skip
    measured = [row['staleness/token_age_mean'] for row in rows[15:70]]
    kappa = group_moments(parse_lengths(lengths, 900), size).token_tail
    assert sum(measured) / len(measured) == pytest.approx(token_age(16, 8, 1, 0.5, kappa), rel=0.12)


def test_a_running_answer_is_longer_than_half_the_mean_answer(tmp_path):
    """E[L^2] / (2 E[L]) of its tokens, since long answers run for longer: exact for the answers that ended."""
    text = 'lognormal(24, 0.75)'
    events, _ = run(tmp_path, simulation__answers=text, rollout__slots=8, run__steps=40, staleness__eta=2.0)
    lengths = [event['tokens'] for event in events if event['kind'] == 'finish']
    decoded = [event for event in events if event['kind'] == 'decode']
    positions = sum(event['positions'] for event in decoded) / sum(event['tokens'] for event in decoded)
    assert positions == pytest.approx(PROMPT - 0.5 + sum(n * (n + 1) for n in lengths) / sum(lengths) / 2, abs=0.51)
    moments = group_moments(parse_lengths(text, 900), GROUP)
    assert positions == pytest.approx(PROMPT + moments.live_position, rel=0.25)
    assert moments.live_position > 0.8 * moments.mean


def test_weights_that_come_every_third_update_add_a_sawtooth_to_the_age(tmp_path):
    _, rows = run(tmp_path, staleness__schedule='every(3)', staleness__eta=4.0)
    ages = [row['staleness/token_age_mean'] for row in rows[3:]]
    assert sum(ages) / len(ages) == age_of_sawtooth(3)


def test_twice_all_rates_halve_the_clock_and_change_no_version(tmp_path):
    fields = {'staleness__eta': 2.0, 'virtual__prefill_token_s': 0.002, 'virtual__publish_s': 0.004}
    slow, _ = run(tmp_path / 'slow', 1.0, **fields)
    halved = {name: value / 2 for name, value in fields.items() if name.startswith('virtual')}
    fast, _ = run(tmp_path / 'fast', 0.5, virtual__decode_step_s=STEP_S / 2, staleness__eta=2.0, **halved)
    kinds = 'admit', 'interrupt', 'load', 'finish', 'consume', 'publish'
    slow, fast = ([event for event in events if event['kind'] in kinds] for events in (slow, fast))
    assert [event['time'] for event in fast] == pytest.approx([event['time'] / 2 for event in slow], abs=1e-7)
    for one, other in zip(slow, fast, strict=True):
        assert {name: one.get(name) for name in ('kind', 'draw', 'versions', 'version')} == {
            name: other.get(name) for name in ('kind', 'draw', 'versions', 'version')
        }


def test_the_order_of_the_engines_changes_nothing(tmp_path):
    """Every group has an engine: of two chips, the slower one sets the pace wherever it stands."""
    chips = ('1 x H800', '1 x A100')
    fields = {
        'simulation__prices': 'roofline', 'simulation__answers': 'constant(200)', 'cluster__engines': '2 x tensor=1',
        'learner__groups_per_update': 2, 'staleness__eta': 0.0, 'rollout__decode_steps': 4, 'run__steps': 4,
    }  # fmt: skip
    ends = [
        update_ends(run(tmp_path / str(index), simulation__engine_chips=', '.join(order), **fields)[0])
        for index, order in enumerate(itertools.permutations(chips))
    ]
    assert ends[0] == ends[1]
