"""The forms have the same weights, and differences are told of the tokens that follow."""

import numpy as np
import pytest

from areal_jax.models.decoder import Decoder
from benchmarks.latents import forms, make_config, spread_next


@pytest.mark.parametrize('small', [False, True])
def test_the_forms_are_of_one_model(small):
    absorbed, expanded = forms(make_config(small=small)).values()
    assert absorbed.cached_numbers < expanded.cached_numbers / 8
    assert Decoder(absorbed).abstract() == Decoder(expanded).abstract()


def test_differences_are_told_of_the_next_tokens_and_of_all():
    difference = np.array([[0.0, -1.0, 9.0], [2.0, 0.0, 0.0], [5.0, 5.0, 5.0]])
    found = spread_next(difference, np.array([2, 1, 0]))  # the tokens that follow are 1 and 0
    assert found == {'mean': 1.5, 'max': 2.0, 'max of all': 9.0}
