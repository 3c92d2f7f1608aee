"""What a run asks of its controller, registry and disk, by hand; the tables of the page; what was measured."""

import dataclasses
import json
import pathlib

import pytest

from areal_jax.simulation.planner.cluster_load import (
    HALF_NODES,
    LAYOUTS,
    MEASURED,
    HostCosts,
    Load,
    Peak,
    choose_pieces,
    fill,
    make_tables,
    number,
    pass_on,
    read_costs,
    receive_once,
    stream,
)
from areal_jax.simulation.stream_prices import MEASURED_STREAM

ROOT = pathlib.Path(__file__).parents[3]
PAGE = ROOT / 'docs' / 'cluster' / 'plan.md'
FREE = HostCosts(**{field.name: 0.0 for field in dataclasses.fields(HostCosts)})


def cost(**changes: float) -> HostCosts:
    return dataclasses.replace(FREE, **changes)


def load_of(costs: HostCosts) -> Load:
    """Of 64 accelerators."""
    return Peak(LAYOUTS[1]).load(costs)


def test_the_layouts_are_of_8_64_and_512_accelerators():
    assert [one.accelerators for one in LAYOUTS] == [8, 64, 512]


def test_the_costs_are_those_that_were_measured():
    measured = dataclasses.asdict(read_costs(ROOT / 'benchmarks' / 'results' / 'host.json'))
    assert measured == pytest.approx(dataclasses.asdict(MEASURED), rel=1e-3)


@pytest.mark.parametrize('one', LAYOUTS, ids=lambda one: str(one.accelerators))
def test_engines_and_learner_keep_pace(one):
    """Neither side waits for more than a tenth of its time."""
    assert Peak(one).generated_s / Peak(one).trained_s == pytest.approx(1, abs=0.1)


def test_weights_masters_and_moments_fit_the_learners_devices():
    """16 bytes a parameter, in half of 80 GB: the rest is for gradients and activations."""
    for one in LAYOUTS:
        shards = one.learner_layout.fsdp * one.learner_layout.tensor
        assert 16 * one.model.parameters / shards < 40e9


def test_a_core_of_the_controller_is_shared_by_answers_pieces_and_tokens():
    tokens_s = load_of(FREE).pace.tokens_s
    assert load_of(cost(answer_s=1e-3)).controller_cpu == pytest.approx(tokens_s / 9_000 * 1e-3)
    assert load_of(cost(piece_s=1e-4)).controller_cpu == pytest.approx(tokens_s / 16 * 1e-4)
    assert load_of(cost(token_s=1e-6)).controller_cpu == pytest.approx(tokens_s * 1e-6)
    checks = cost(question_s=4e-4, entry_s=5e-5)
    assert load_of(checks).controller_cpu == pytest.approx(40 * (4e-4 / 5 + 5e-5))
    sent = cost(batch_byte_s=5e-9, batch_token_bytes=8.5)
    seconds = 4_096 * 9_000 / tokens_s
    assert load_of(sent).controller_cpu == pytest.approx(4_096 * 9_000 * 8.5 * 5e-9 / seconds)


def test_a_version_is_read_once_by_each_node():
    """7.616e9 parameters of 2 bytes; 40 engines on 5 nodes, 3 learner processes."""
    load = load_of(cost(write_byte_s=1e-9, read_byte_s=2e-9))
    size = pytest.approx(15.231e9, rel=1e-4)
    assert load.version_bytes == size
    assert load.read_bytes / 5 == size
    assert (load.write_s, load.read_s) == (pytest.approx(5.077, rel=1e-4), pytest.approx(30.462, rel=1e-4))


def test_operations_on_the_registry():
    """1 controller, 3 learner processes, 40 engines: 44 heartbeats, a listing, 44 times and 44 contents."""
    assert load_of(FREE).registry_operations_s == 44 + 1 + 88


@pytest.mark.parametrize(
    ('value', 'text'), [(0.0123, '0.01'), (1.234, '1.23'), (45_912.0, '45,900'), (12.34, '12.3'), (123.4, '123')]
)
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


def test_a_table_comes_between_its_marks():
    page = 'a\n<!-- t: python -m areal_jax.simulation.planner.cluster_load -->\nold\n<!-- end -->\nb'
    once = fill(page, {'t': '| new |'})
    assert '| new |' in once
    assert 'old' not in once
    assert once.startswith('a\n')
    assert once.endswith('\nb')
    assert fill(once, {'t': '| new |'}) == once
    with pytest.raises(ValueError, match='no place'):
        fill('a', {'t': '| new |'})


def test_the_page_has_the_tables():
    filled = fill(PAGE.read_text(), make_tables(MEASURED))
    assert filled == PAGE.read_text(), 'python -m areal_jax.simulation.planner.cluster_load --page=docs/cluster/plan.md'


def test_pieces_are_as_small_as_the_controller_can_take_in():
    """1e6 tokens a second in pieces of 16, 64 or 256, of 10 us each: 0.63, 0.16, 0.04 cores; of 40 us 2.5, 0.63."""
    pace = dataclasses.replace(load_of(FREE).pace, tokens_s=1e6)
    for piece_s, steps in ((10e-6, 16), (40e-6, 64), (1e-3, 256)):
        load = dataclasses.replace(load_of(cost(piece_s=piece_s)), pace=pace)
        assert choose_pieces(load).decode_steps == steps


def test_versions_over_sockets_are_limited_by_the_links_of_the_learner():
    """65.5 GB from 22 processes to 42 engines on 42 nodes, to 84 engines, and once in all; 12.5 GB/s a node."""
    load, halves = Peak(LAYOUTS[2]).load(FREE), Peak(HALF_NODES).load(FREE)
    nbytes = load.version_bytes
    assert stream(load).transfer_s == pytest.approx(42 * nbytes / 22 / 12.5e9 + 0.01)
    assert stream(halves).transfer_s == pytest.approx(84 * nbytes / 22 / 12.5e9 + 0.01)
    assert pass_on(load).transfer_s == pytest.approx(nbytes / 12.5e9 + 0.01)
    assert receive_once(halves).transfer_s == stream(load).transfer_s
    assert stream(halves).load_s > stream(load).load_s  # by fewer devices


def test_the_costs_of_sockets_are_those_that_were_measured():
    rows = json.loads((ROOT / 'benchmarks' / 'results' / 'host_stream.json').read_text())['rows']
    large, small = (next(row for row in rows if row['of'] == name) for name in ('bytes', 'frames'))
    for name, value in dataclasses.asdict(MEASURED_STREAM).items():
        if name.endswith('_byte_s'):
            assert value == pytest.approx(large[f'{name.removesuffix("_byte_s")}_cpu_s'] / large['bytes'])
    assert MEASURED_STREAM.frame_s == pytest.approx(small['receive_cpu_s'] / small['frames'])
