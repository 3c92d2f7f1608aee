"""What a plan is asked for: texts, sizes, and what is refused in one sentence."""

import dataclasses

import pytest

from areal_jax.config.fields import ConfigError
from areal_jax.simulation.planner.advice import (
    count_slots,
    count_training,
    describe_lengths,
    describe_log,
    find_engine_devices,
    make_setting,
    parse_cluster,
)
from areal_jax.simulation.prices import H800, R1_DISTILL_1_5B, R1_DISTILL_7B, R1_DISTILL_32B, V5E
from tests.simulation.planner.rig import make


def test_a_cluster():
    assert parse_cluster('64 x H800') == (64, H800)


def test_an_engine_has_a_quarter_of_its_memory_for_weights():
    """Of 80 GB: 3.6 GB of 1.5B and 15.2 GB of 7B fit in 20 GB, 65.5 GB of 32B in 4 x 20."""
    found = [find_engine_devices(H800, shape, 28_672) for shape in (R1_DISTILL_1_5B, R1_DISTILL_7B, R1_DISTILL_32B)]
    assert found == [1, 1, 4]
    assert find_engine_devices(V5E, R1_DISTILL_1_5B, 28_672) == 1


def test_slots_are_what_fits():
    """72 GB less 15.2 GB of 7B, over 57,344 bytes a position and 7,154 positions: 138, and .9 of it; 256 at most."""
    assert count_slots(H800, R1_DISTILL_7B, 1, 7_154) == 124
    assert count_slots(H800, R1_DISTILL_1_5B, 1, 7_154) == 256


def test_a_learner_holds_16_bytes_a_parameter_in_half_of_its_memory():
    """7.6e9 parameters: 122 GB in 40 GB each."""
    assert count_training(H800, R1_DISTILL_7B) == 4


def test_lengths_are_cut_at_three_means():
    answers = describe_lengths('lognormal(9000,.75)', 8192, 16)
    assert (answers.limit, answers.context, answers.groups) == (27_648, 28_672, 512)
    assert answers.moments.tail == pytest.approx(2.66, abs=0.01)
    assert 1 / answers.moments.tail == pytest.approx(0.38, abs=0.01)  # of the slots that slots / group size fill


def test_moments_of_a_log():
    """Two groups of two: 2, 4 and 6, 8 (cut at 8): mean 5, longest (4 + 8) / 2, products (8 + 16 + 48 + 64) / 4."""
    answers = describe_log('log(run)', [((2, 0.0), (4, 1.0)), ((6, 0.0), (9, 1.0))], 4, 8)
    moments = answers.moments
    assert (moments.mean, moments.second, moments.longest, moments.product) == (5, 30, 6, 34)


def test_a_part_of_the_cluster():
    small = make(devices=128, answers=2048).shrink(8)
    assert (small.devices, small.answers.count, small.answers.groups) == (16, 256, 16)


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('64 H800', 'is not of the form'),
        ('0 x H800', '0 devices are too few'),
        ('1 x H800', 'engines and learner need one each'),
        ('8 x H801', "the chip 'H801' is not known"),
        ('32 x H800 + 32 x A100', 'devices of several kinds'),
    ],
)
def test_what_is_no_cluster(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_cluster(text)


def test_a_plan_that_does_not_fit_says_both_numbers():
    answers = describe_lengths('constant(1000)', 256, 16)
    message = r'an engine takes 4 \(288 GB .* the learner 14 \(524 GB .*, 18 together'
    with pytest.raises(ConfigError, match=message):
        make_setting(17, H800, R1_DISTILL_32B, answers)
    assert make_setting(18, H800, R1_DISTILL_32B, answers).engine_devices == 4
    vast = dataclasses.replace(R1_DISTILL_32B, parameters=1e12)
    with pytest.raises(ConfigError, match=r'needs 8,000 GB, a quarter .* 64 x TPU v5e have 1,024 GB'):
        make_setting(4096, V5E, vast, answers)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (('lognormal(9000, 0.75)', 100, 16), 'no multiple of --group_size=16: use 96 or 112'),
        (('lognormal(9000, 0.75)', 8, 16), 'one group at least'),
        (('normal(3)', 16, 16), 'is not known'),
        (('constant(3) -> constant(5)', 16, 16), 'changes in a run'),
        (('constant(3); constant(5)', 16, 16), 'changes in a run'),
    ],
)
def test_batches_and_lengths_that_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        describe_lengths(*arguments)
