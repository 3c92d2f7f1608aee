from __future__ import annotations

from areal_jax.report.token_fates import age_histograms, token_age, token_age_steps
from tests.telemetry.logs import two_metrics


def test_the_histograms_by_hand():
    # 10 + 2 tokens of age 0, 4 of age 1: before the 3 steps of update 1; the step of update 2 comes after the batch
    found = age_histograms(two_metrics((3, 1), (1, 0)))
    assert found == {'publications': [[0, 12], [1, 4]], 'steps': [[0, 12], [3, 4]]}
    assert token_age(two_metrics()) == {'mean': 0.25, 'max': 1}


def test_ages_in_steps_need_the_steps_of_every_update():
    first, second = two_metrics()
    del first['update/optimizer_steps']
    assert age_histograms([first, second])['steps'] == []
    assert age_histograms([second])['steps'] == []  # the first update is missing: nobody knows its steps
    assert age_histograms([]) == {'publications': [], 'steps': []}


def test_the_part_inside_the_update_is_weighted_by_tokens():
    lines = [
        line | {'staleness/steps_inside_update_mean': mean, 'staleness/steps_inside_update_max': mean + 1}
        for line, mean in zip(two_metrics(), (1.0, 3.0), strict=True)
    ]
    found = token_age_steps(lines)
    assert (found['inside_mean'], found['inside_max']) == ((10 * 1 + 6 * 3) / 16, 4.0)
    assert (found['mean'], found['max']) == (None, None)
