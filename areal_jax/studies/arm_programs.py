"""What a study runs as processes besides single runs: programs of many arms, and the scoring of runs.

A job has a directory of its own with the list of its arms, which the process reads. Nothing here imports jax.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Sequence

from absl import flags
from ml_collections import config_dict

from areal_jax import files
from areal_jax.app.command_line import parse_train_command
from areal_jax.app.sweep.arms import TRAINER, Arm, ArmState, read_state
from areal_jax.app.workdir.run_list import LOG, read_end
from areal_jax.studies.arms import arm as arms_of

LIST = 'arms.json'  # in the directory of a job: {'arms': {name: arguments of main_train}}
SCORE = 'score.json'  # in the workdir of a run
PROGRAMS = 'programs'  # directory of the jobs, inside the study's


@dataclasses.dataclass(frozen=True)
class Program:
    """Arms that one process trains together."""

    name: str
    workdir: pathlib.Path  # of the job; each arm has one of its own
    arms: tuple[Arm, ...]
    module = 'areal_jax.studies.train_program'

    def command(self, resume: bool) -> list[str]:
        """What runs it; a program that was ended begins anew."""
        return [sys.executable, '-m', self.module, str(self.workdir / LIST)]

    def write_list(self) -> None:
        """Writes what the process reads."""
        self.workdir.mkdir(parents=True, exist_ok=True)
        files.write_json(self.workdir / LIST, {'arms': {arm.name: list(arm.arguments) for arm in self.arms}})

    def read_state(self) -> ArmState:
        """Of all its arms: finished once all are."""
        states = [read_state(arm) for arm in self.arms]
        updates, finished = min(state.updates for state in states), all(state.is_finished for state in states)
        reason = '' if finished else read_end(self.workdir / LOG)
        return ArmState(updates, finished, False, finished, reason)


@dataclasses.dataclass(frozen=True)
class Scoring(Program):
    """The scores of the final weights of single runs that have finished."""

    module = 'areal_jax.studies.score_runs'

    def read_state(self) -> ArmState:
        finished = all((arm.workdir / SCORE).exists() for arm in self.arms)
        return ArmState(0, finished, False, finished, '' if finished else read_end(self.workdir / LOG))


def make_programs(stage: str, arms: Sequence[Arm], workdir: pathlib.Path) -> list[Program]:
    """Programs of arms that have one lag each, so that none generates what it does not train.

    Raises ConfigError, naming arm and field, for an arm that no program can train.
    """
    by_lag: dict[str, list[Arm]] = {}
    for arm in arms:
        by_lag.setdefault(arm.config.staleness.schedule, []).append(arm)
    programs = []
    for schedule, members in by_lag.items():
        named = {arm.name: arm for arm in members}
        for number, part in enumerate(arms_of.partition([arms_of.Arm(arm.name, arm.config) for arm in members])):
            name = f'{stage}_lag{schedule.removeprefix("fixed(").replace("(", "").removesuffix(")")}_{number}'
            programs.append(Program(name, workdir / PROGRAMS / name, tuple(named[arm.name] for arm in part)))
    return programs


def read_list(path: pathlib.Path) -> dict[str, tuple[pathlib.Path, config_dict.ConfigDict]]:
    """(workdir, config) of each arm of a job, by name; raises UserError for a list that is damaged or not valid."""
    found = {}
    for name, arguments in files.read_json(path, 'start the study again, which writes it').get('arms', {}).items():
        values = flags.FlagValues()
        flags.DEFINE_string('workdir', None, '', flag_values=values)
        config = parse_train_command([TRAINER, *arguments], values).config
        found[name] = pathlib.Path(values.workdir), config
    return found
