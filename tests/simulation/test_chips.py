"""simulation/prices.py: names are found, and peaks are those of one chip in one unit."""

import pytest

from areal_jax.config.fields import ConfigError
from areal_jax.simulation.prices import A100, ASSUMED_NIC_BYTES_S, CHIPS, H100, H800, TPU7X, V5E, find_chip


@pytest.mark.parametrize(
    ('name', 'chip'),
    [
        ('H800', H800),
        ('h800 sxm', H800),
        (' H100 SXM ', H100),
        ('a100', A100),
        ('A100-80', A100),
        ('TPU v5e', V5E),
        ('v5e', V5E),
        ('tpu7x', TPU7X),
    ],
)
def test_a_chip_is_found_by_its_usual_names(name, chip):
    assert find_chip(name) is chip


def test_an_unknown_chip_is_refused_with_a_near_name():
    with pytest.raises(
        ConfigError, match=r"the chip 'H8000' is not known; did you mean h800\?; use one of A100-80 SXM"
    ):
        find_chip('H8000')


def test_every_chip_is_found_under_its_own_name():
    assert [find_chip(chip.name) for chip in CHIPS] == list(CHIPS)
    assert all(chip.source for chip in CHIPS)


def test_the_network_of_a_host_is_shared_by_its_chips():
    """8 chips of 3.2 Tb/s, and 8 of two NICs of 100 Gb/s; what is not published is assumed."""
    assert H800.network_bytes_s == 3.2e12 / 8 / 8
    assert V5E.network_bytes_s == 3.125e9
    assert H100.nic_bytes_s is None
    assert H100.network_bytes_s == ASSUMED_NIC_BYTES_S
