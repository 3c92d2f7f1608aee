from __future__ import annotations

import pytest

from areal_jax.app.workdir import prepare_workdir
from areal_jax.ranges import ConfigError

_VALUES = {'mesh': {'fsdp': 8}, 'learner': {'layers': 'list', 'rows_per_microbatch': 8, 'epochs': 1}}


@pytest.mark.parametrize(
    'change',
    [{'mesh': {'fsdp': 2}}, {'learner': {**_VALUES['learner'], 'layers': 'stacked', 'rows_per_microbatch': 2}}],
)
def test_a_run_may_go_on_elsewhere_and_in_another_form(tmp_path, change):
    prepare_workdir(tmp_path, _VALUES, resume=False)
    prepare_workdir(tmp_path, _VALUES | change, resume=True)
    assert f'"{next(iter(change))}"' in (tmp_path / 'config.json').read_text()


def test_a_run_may_not_go_on_with_another_objective(tmp_path):
    prepare_workdir(tmp_path, _VALUES, resume=False)
    with pytest.raises(ConfigError, match=r'learner.epochs: 1 -> 2; use the same, or a new workdir'):
        prepare_workdir(tmp_path, _VALUES | {'learner': {**_VALUES['learner'], 'epochs': 2}}, resume=True)
