"""A sweep of programs: what its config file gives, and the table of scores."""

from __future__ import annotations

import runpy

import pytest

from areal_jax.app.command_line import CommandLine, CommandLineError, load_config
from areal_jax.studies.stages import ProgramSweep, render_scores

FILE = 'configs/sweeps/frictions.py'
FRICTIONS = runpy.run_path(FILE)


def command(source: str) -> CommandLine:
    return CommandLine(load_config(source), source, ())


def test_the_sweep_of_frictions_has_every_arm_once():
    arms = FRICTIONS['get_programs']()
    assert len(arms['full']) == 6 * 6 * 3 * 3
    assert len(arms['quick']) == 36
    parts = [name.split('.') for name in arms['full']]
    assert {part[2] for part in parts} == {'4', '8', '12'}
    whole = arms['full']['dg.all_four.8.seed1']
    assert whole['staleness.schedule'] == 'fixed(30)'
    assert all(whole[f'friction.{name}'] > 0 for name in ('actor_share', 'reward_share', 'unrewarded_share'))
    assert not any(path.startswith(('friction.', 'staleness.')) for path in arms['full']['dg.none.8.seed1'])


@pytest.mark.whole
@pytest.mark.parametrize('file', [FILE, 'configs/sweeps/stale_methods.py'])
def test_every_arm_of_the_short_form_can_be_trained_and_nothing_is_written(tmp_path, file):
    sweep = ProgramSweep(command(file), 'quick', tmp_path / 'sweep', 1)
    assert len(sweep.arms) == len(runpy.run_path(file)['get_programs']()['quick'])
    assert not (tmp_path / 'sweep').exists()


def test_scores_are_medians_by_row_column_and_table():
    scores = {'dg.none.4.seed0': 0.5, 'dg.none.4.seed1': 0.9, 'dg.none.4.seed2': 0.6, 'ppo.all.4.seed0': 0.75}
    assert render_scores(scores).splitlines() == [
        '| 4 | none | all |',
        '| --- | --- | --- |',
        '| dg | 0.60 (0.50 to 0.90) |  |',
        '| ppo |  | 0.75 |',
    ]


@pytest.mark.parametrize(
    ('returned', 'words'),
    [
        ("{'full': {}}", r'get_programs\(\) must be a function which returns'),
        ("{'full': {'a.b.seed0': {}}}", r"the arm 'a\.b\.seed0' has no name of the form ROW\.COLUMN\.TABLE\.SEED"),
    ],
)
def test_a_file_that_gives_something_else_is_named(tmp_path, returned, words):
    path = tmp_path / 'mine.py'
    head = 'from areal_jax import config as schema\n\n\ndef get_config():\n    return schema.default_config()\n\n\n'
    path.write_text(f'{head}def get_programs():\n    return {returned}\n')
    with pytest.raises(CommandLineError, match=words):
        ProgramSweep(command(str(path)), 'full', tmp_path / 'sweep', 1)
