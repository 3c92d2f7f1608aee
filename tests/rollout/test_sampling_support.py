import dataclasses

import numpy as np
import pytest

from areal_jax.rollout.backend import SamplingError
from tests.rollout.engine_rig import SAMPLING, Rig, request

WRONG = {
    'temperature': (1e-9, 'temperature=1e-09 must lie between 1e-05 and 100000, or be 0'),
    'top_k': (-1, 'top_k=-1 must not be negative; use 0'),
    'top_p': (1.5, r'top_p=1\.5 must lie between 0 and 1$'),
    'min_p': (np.nan, 'min_p=nan must lie between 0 and 1'),
    'repetition_penalty': (0.0, r'repetition_penalty=0\.0 must lie between 0\.01 and 100'),
    'frequency_penalty': (3.0, r'frequency_penalty=3\.0 must lie between -2 and 2'),
    'presence_penalty': (np.inf, 'presence_penalty=inf must lie between -2 and 2'),
    'logit_scale': (0.0, r'logit_scale=0\.0 must lie between 1e-05 and 100000'),
    'min_new_tokens': (8, 'min_new_tokens=8 must lie between 0 and max_new_tokens=7'),
    'logit_bias': (((64, 1.0),), 'logit_bias has token 64; use tokens from 0 to 63'),
    'logit_bias ': (((1, np.nan),), 'logit_bias of token 1 is nan; use values from -100 to 100'),
    'logit_bias  ': (((1, 1.0), (1, 2.0)), 'names a token twice'),
    'logit_bias   ': (tuple((i, 1.0) for i in range(5)), 'logit_bias has 5 tokens, but a row holds 4; use fewer'),
    'stop_tokens': ((1, 2, 3, 4, 5), '5 stop tokens, but a row holds 4; use fewer'),
    'stop_strings': (('',), 'has an empty string; leave it out'),
    'stop_strings ': (('x',), 'engine/0 has no tokenizer to find them with; use stop tokens'),
}


@pytest.mark.parametrize('field', WRONG)
def test_sampling_parameters_that_no_row_can_have_are_refused_when_they_arrive(field):
    value, message = WRONG[field]
    with pytest.raises(SamplingError, match='^request 0/4/0: .*' + message):
        Rig().engine.generate(request(0, sampling=dataclasses.replace(SAMPLING, **{field.strip(): value})))
