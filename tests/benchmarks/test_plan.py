"""benchmarks/cluster_load.py: its arithmetic by hand; benchmarks/plan.py: the page that has its tables."""

import dataclasses
import pathlib

import pytest

from benchmarks.cluster_load import PLANS, Load, Measured, read_measured
from benchmarks.plan import RESULTS, fill, make_tables, number

PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'cluster' / 'plan.md'
FREE = Measured(**{field.name: 0.0 for field in dataclasses.fields(Measured)})


def measured(**changes: float) -> Measured:
    return dataclasses.replace(FREE, **changes)


def test_the_plans_are_of_8_64_and_512_accelerators():
    assert [one.accelerators for one in PLANS] == [8, 64, 512]


@pytest.mark.parametrize('one', PLANS, ids=lambda one: str(one.accelerators))
def test_engines_and_learner_keep_pace(one):
    """Neither side waits for more than a tenth of its time."""
    load = Load(one, FREE)
    assert load.generated_s / load.trained_s == pytest.approx(1, abs=0.1)


def test_weights_masters_and_moments_fit_the_learners_devices():
    """16 bytes a parameter, in half of 80 GB: the rest is for gradients and activations."""
    for one in PLANS:
        shards = one.learner_layout.fsdp * one.learner_layout.tensor
        assert 16 * one.model.parameters / shards < 40e9


def test_a_core_of_the_controller_is_shared_by_answers_pieces_and_tokens():
    load = Load(PLANS[1], FREE)
    tokens_s = load.tokens_s
    assert Load(PLANS[1], measured(answer_s=1e-3)).controller_cpu == pytest.approx(tokens_s / 9_000 * 1e-3)
    assert Load(PLANS[1], measured(piece_s=1e-4)).controller_cpu == pytest.approx(tokens_s / 16 * 1e-4)
    assert Load(PLANS[1], measured(token_s=1e-6)).controller_cpu == pytest.approx(tokens_s * 1e-6)
    checks = measured(question_s=4e-4, entry_s=5e-5)
    assert Load(PLANS[1], checks).controller_cpu == pytest.approx(40 * (4e-4 / 5 + 5e-5))
    sent = measured(batch_byte_s=5e-9, batch_token_bytes=8.5)
    seconds = 4_096 * 9_000 / tokens_s
    assert Load(PLANS[1], sent).controller_cpu == pytest.approx(4_096 * 9_000 * 8.5 * 5e-9 / seconds)


def test_a_version_is_read_once_by_each_node():
    """7.616e9 parameters of 2 bytes; 40 engines on 5 nodes, 3 learner processes."""
    load = Load(PLANS[1], measured(write_byte_s=1e-9, read_byte_s=2e-9))
    size = pytest.approx(15.231e9, rel=1e-4)
    assert load.version_bytes == size
    assert load.read_bytes / 5 == size
    assert (load.write_s, load.read_s) == (pytest.approx(5.077, rel=1e-4), pytest.approx(30.462, rel=1e-4))


def test_operations_on_the_registry():
    """1 controller, 3 learner processes, 40 engines: 44 heartbeats, a listing, 44 times and 44 contents."""
    assert Load(PLANS[1], FREE).registry_operations_s == 44 + 1 + 88


@pytest.mark.parametrize(
    ('value', 'text'), [(0.0123, '0.01'), (1.234, '1.23'), (45_912.0, '45,900'), (12.34, '12.3'), (123.4, '123')]
)
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


def test_a_table_comes_between_its_marks():
    page = 'a\n<!-- t: python -m benchmarks.plan -->\nold\n<!-- end -->\nb'
    once = fill(page, {'t': '| new |'})
    assert '| new |' in once
    assert 'old' not in once
    assert once.startswith('a\n')
    assert once.endswith('\nb')
    assert fill(once, {'t': '| new |'}) == once
    with pytest.raises(ValueError, match='no place'):
        fill('a', {'t': '| new |'})


def test_the_page_has_the_tables_of_the_results():
    tables = make_tables(read_measured(RESULTS / 'host.json'))
    assert fill(PAGE.read_text(), tables) == PAGE.read_text(), 'python -m benchmarks.plan --page=docs/cluster/plan.md'
