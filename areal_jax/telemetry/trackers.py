"""Experiment trackers: what wandb, mlflow and trackio are told of a run. telemetry/trackers.py feeds them.

Each keeps its data on this machine where no account and no server is named: their own environment variables say
where they send it. A run is found again by its token, so that a resumed run goes on in it.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
import os
import pathlib
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from areal_jax.config import flatten
from areal_jax.telemetry import names
from areal_jax.telemetry.trackers import last_step_in

Row = Mapping[str, float]
Config = Mapping[str, object]  # nested by section
_FINISH_S = 15.0  # for what wandb has not sent when the run ends; it stays on the disk for `wandb sync`
_TOKEN_TAG, _GROUP_TAG = 'areal_jax.token', 'areal_jax.group'
_RENAMED: Mapping[str, str] = {names.TIME: 'time_s'}  # trackio keeps 'time' for itself
_MOST_PARAMETERS, _MOST_PARAMETER = 100, 6000  # of mlflow: in a request, and characters of a value


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """The run as a tracker shows it."""

    project: str
    name: str
    group: str  # '' for none
    token: str  # unique, and the same after a resume
    workdir: pathlib.Path
    config: Config


@dataclasses.dataclass(frozen=True)
class Beginning:
    """Where the run is in the tracker, in words, and the last step that its store holds; None: it does not say."""

    place: str
    last_step: int | None


class Tracker(abc.ABC):
    """One run in one library. The constructor imports the library, which raises what a broken installation raises.

    The methods are called from one thread and raise whatever the library raises.
    """

    module: ClassVar[str]
    project_variable: ClassVar[str]  # environment variable of the library

    def __init__(self) -> None:
        self._library = importlib.import_module(self.module)

    @abc.abstractmethod
    def begin(self, run: TrackedRun) -> Beginning:
        """Makes the run, or goes on with the one of the same token."""

    @abc.abstractmethod
    def log(self, step: int, row: Row) -> None: ...

    @abc.abstractmethod
    def end(self, state: str, summary: Row, pages: Sequence[pathlib.Path]) -> None:
        """`state`: 'finished', 'stopped' or 'failed'; `summary` and `pages` are empty for the last two."""


class WandbTracker(Tracker):
    """Weights & Biases: online where it is logged in or WANDB_MODE says so, else offline in WORKDIR/wandb."""

    module, project_variable = 'wandb', 'WANDB_PROJECT'

    def begin(self, run: TrackedRun) -> Beginning:
        mode = os.environ.get('WANDB_MODE')
        if not mode:  # without a question to the user, and without the network
            mode = 'online' if self._library.login(prompt=False, verify=False) else 'offline'
        self._run = self._library.init(
            project=run.project, id=run.token, name=os.environ.get('WANDB_NAME') or run.name, group=run.group or None,
            config=dict(run.config), dir=str(run.workdir), resume='allow', mode=mode,
            reinit='create_new',  # not the run of a program that calls this one
            settings=self._library.Settings(console='off', silent=True, finish_timeout=_FINISH_S),
        )  # fmt: skip
        self._run.define_metric(names.EVALUATION_VERSION)
        self._run.define_metric(f'{names.EVALUATION}*', step_metric=names.EVALUATION_VERSION)
        if mode == 'online':
            return Beginning(str(self._run.url), self._run.step - 1)
        if mode != 'offline':
            return Beginning(f'WANDB_MODE={mode}', None)
        found = sorted((run.workdir / 'wandb').glob(f'offline-run-*-{run.token}/*.wandb'))
        return Beginning(f'offline, `wandb sync {run.workdir}/wandb/offline-run-*` sends it', last_step_in(found))

    def log(self, step: int, row: Row) -> None:
        self._run.log(dict(row), step=step)

    def end(self, state: str, summary: Row, pages: Sequence[pathlib.Path]) -> None:
        self._run.summary.update(dict(summary))
        for page in pages:
            shutil.copy(page, self._run.dir)  # wandb sends what is there
        self._run.finish(exit_code=0 if state == 'finished' else 1)


class MlflowTracker(Tracker):
    """MLflow: the store that MLFLOW_TRACKING_URI names, else mlflow's own default below the working directory."""

    module, project_variable = 'mlflow', 'MLFLOW_EXPERIMENT_NAME'
    _status: ClassVar[Mapping[str, str]] = {'finished': 'FINISHED', 'stopped': 'KILLED', 'failed': 'FAILED'}

    def begin(self, run: TrackedRun) -> Beginning:
        self._entities = importlib.import_module('mlflow.entities')
        self._client = self._library.MlflowClient()
        experiment = self._client.get_experiment_by_name(run.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        found = self._client.search_runs([number], f"tags.`{_TOKEN_TAG}` = '{run.token}'")
        place = f'{self._library.get_tracking_uri()}, experiment {run.project}'
        values = {name: str(value)[:_MOST_PARAMETER] for name, value in flatten(run.config)}
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status='RUNNING')
            self._note_changes(found[0].data.params, values)
            return Beginning(place, self._find_last_step())
        tags = {_TOKEN_TAG: run.token, 'mlflow.source.name': str(run.workdir)}
        tags |= {_GROUP_TAG: run.group} if run.group else {}
        self._id = self._client.create_run(number, run_name=run.name, tags=tags).info.run_id
        params = [self._entities.Param(name, value) for name, value in values.items()]
        for first in range(0, len(params), _MOST_PARAMETERS):
            self._client.log_batch(self._id, params=params[first : first + _MOST_PARAMETERS])
        return Beginning(place, -1)

    def log(self, step: int, row: Row) -> None:
        now = int(time.time() * 1000)
        metrics = [
            self._entities.Metric(_allowed_name(name), value, now, at)
            for at, values in _by_version(step, row)
            for name, value in values.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def end(self, state: str, summary: Row, pages: Sequence[pathlib.Path]) -> None:
        for name, value in summary.items():
            self._client.log_metric(self._id, _allowed_name(name), value)
        for page in pages:
            self._client.log_artifact(self._id, str(page))
        self._client.set_terminated(self._id, self._status[state])

    def _find_last_step(self) -> int:
        """Every update has a time; the evaluation before training, step 0, has none."""
        found = [self._client.get_metric_history(self._id, name) for name in (names.TIME, names.EVALUATION_VERSION)]
        return max((metric.step for history in found for metric in history), default=-1)

    def _note_changes(self, before: Mapping[str, str], values: Mapping[str, str]) -> None:
        """A parameter cannot be changed, so that what a resume changes is a tag."""
        for name, value in values.items():
            if before.get(name, value) != value:
                self._client.set_tag(self._id, f'resumed.{name}', value)


class TrackioTracker(Tracker):
    """trackio: below TRACKIO_DIR, else its own default in the home directory; or the Space of TRACKIO_SPACE_ID."""

    module, project_variable = 'trackio', 'TRACKIO_PROJECT'

    def begin(self, run: TrackedRun) -> Beginning:
        name = f'{run.name}-{run.token}'  # a run is found by its name
        self._run = self._library.init(
            project=run.project, name=name, group=run.group or None, config=dict(run.config), resume='allow',
            embed=False,
        )  # fmt: skip
        following = getattr(self._run, '_next_step', None)
        place = f'run {name} of project {run.project}, shown by `trackio show`'
        return Beginning(place, following - 1 if isinstance(following, int) else None)

    def log(self, step: int, row: Row) -> None:
        for at, values in _by_version(step, row):
            self._run.log({_RENAMED.get(name, name): value for name, value in values.items()}, step=at)

    def end(self, state: str, summary: Row, pages: Sequence[pathlib.Path]) -> None:
        shown = [page for page in pages if page.suffix == '.md']
        texts = {page.name: self._library.Markdown(page.read_text()) for page in shown}
        if summary or texts:
            self._run.log({**summary, **texts})
        self._run.finish()


TRACKERS: Mapping[str, type[Tracker]] = {
    'wandb': WandbTracker,
    'mlflow': MlflowTracker,
    'trackio': TrackioTracker,
}


def _by_version(step: int, row: Row) -> Iterator[tuple[int, Row]]:
    """The row of an update, and of an evaluation in it those metrics at the version that they are of."""
    evaluation = {name: value for name, value in row.items() if name.startswith(names.EVALUATION)}
    if rest := {name: value for name, value in row.items() if name not in evaluation}:
        yield step, rest
    if evaluation:
        yield int(evaluation.get(names.EVALUATION_VERSION, step)), evaluation


def _allowed_name(name: str) -> str:
    """As mlflow allows it: letters, digits, and _ - . : / and blanks."""
    return re.sub(r'[^\w\-.:/ ]', '_', name)
