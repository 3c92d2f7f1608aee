"""Experiment trackers: sends a run to wandb, mlflow or trackio.

Each keeps its data on this machine unless an account or a server is set, by the library's environment variables. A
run is found again by its token, so a resumed run continues in the same tracker run.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
import importlib
import os
import pathlib
import re
import shutil
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

from areal_jax import files
from areal_jax.config import flatten
from areal_jax.telemetry import names
from areal_jax.telemetry.hook import MOST_WAITING, RowFacts, RowThread, finite, read_progress
from areal_jax.telemetry.metrics import Line

_HEADER, _BLOCK = 7, 32768
_PART = struct.Struct('<IHB')  # checksum, length, kind
_WHOLE, _FIRST, _LAST = 1, 2, 4  # kinds; 3 is a part between


def last_step_in(paths: Iterable[pathlib.Path]) -> int | None:
    """The highest step in these files, -1 for none; None if this version of wandb cannot be read."""
    try:
        record = importlib.import_module('wandb.proto.wandb_internal_pb2').Record
        steps = [-1]
        for path in paths:
            for content in read_records(path.read_bytes()):
                found = record.FromString(content)
                if found.WhichOneof('record_type') == 'history':
                    steps.append(found.history.step.num)
        return max(steps)
    except Exception:  # a private module of wandb, which may change
        return None


def read_records(content: bytes) -> Iterator[bytes]:
    """Yields the complete records of a wandb file; a record that was being written is left out."""
    position, parts = _HEADER, b''
    while position + _PART.size <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _PART.size:  # too short for a part: padding
            position += left
            continue
        _, length, kind = _PART.unpack_from(content, position)
        begin = position + _PART.size
        if not kind or begin + length > len(content):
            return
        parts = (b'' if kind in (_WHOLE, _FIRST) else parts) + content[begin : begin + length]
        position = begin + length
        if kind in (_WHOLE, _LAST):
            yield parts


Row = Mapping[str, float]
Config = Mapping[str, object]  # nested by section
_FINISH_S = 15.0  # to send the rest when the run ends; unsent data stay on the disk for `wandb sync`
_TOKEN_TAG, _GROUP_TAG = 'areal_jax.token', 'areal_jax.group'
_RENAMED: Mapping[str, str] = {names.TIME: 'time_s'}  # trackio keeps 'time' for itself
_MOST_PARAMETER = 6000  # of mlflow: characters of a value


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
    """The run's place in the tracker."""

    place: str  # in words
    last_step: int | None  # the last step in the tracker's store; None: unknown


class Tracker(abc.ABC):
    """One run in one library. The constructor imports the library, so it may raise whatever the import raises.

    The methods are called from one thread and may raise whatever the library raises.
    """

    module: ClassVar[str]
    project_variable: ClassVar[str]  # environment variable of the library

    def __init__(self) -> None:
        self._library = importlib.import_module(self.module)

    @abc.abstractmethod
    def begin(self, run: TrackedRun) -> Beginning:
        """Makes the run, or continues the run with the same token."""

    @abc.abstractmethod
    def log(self, step: int, row: Row) -> None: ...

    @abc.abstractmethod
    def end(self, state: str, summary: Row, pages: Sequence[pathlib.Path]) -> None:
        """Ends the run as 'finished', or as 'stopped' or 'failed' with empty `summary` and `pages`."""


class WandbTracker(Tracker):
    """Weights & Biases: online if it is logged in or WANDB_MODE says so, else offline in WORKDIR/wandb."""

    module, project_variable = 'wandb', 'WANDB_PROJECT'

    def begin(self, run: TrackedRun) -> Beginning:
        mode = os.environ.get('WANDB_MODE')
        if not mode:  # without a prompt and without the network
            mode = 'online' if self._library.login(prompt=False, verify=False) else 'offline'
        self._run = self._library.init(
            project=run.project, id=run.token, name=os.environ.get('WANDB_NAME') or run.name, group=run.group or None,
            config=dict(run.config), dir=str(run.workdir), resume='allow', mode=mode,
            reinit='create_new',  # not the run of a calling program
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
            shutil.copy(page, self._run.dir)  # wandb sends the files in this folder
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
        self._client.log_batch(self._id, params=[self._entities.Param(*one) for one in values.items()])
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
        """The last logged step, -1 for none. Updates have a time; the evaluation before training, step 0, does not."""
        found = [self._client.get_metric_history(self._id, name) for name in (names.TIME, names.EVALUATION_VERSION)]
        return max((metric.step for history in found for metric in history), default=-1)

    def _note_changes(self, before: Mapping[str, str], values: Mapping[str, str]) -> None:
        """Notes changes by a resume as tags, because mlflow parameters cannot be changed."""
        for name, value in values.items():
            if before.get(name, value) != value:
                self._client.set_tag(self._id, f'resumed.{name}', value)


class TrackioTracker(Tracker):
    """trackio: below TRACKIO_DIR, else its default in the home directory; or the Space of TRACKIO_SPACE_ID."""

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
    """Yields the row of an update and, if it holds an evaluation, the evaluation's metrics at their version."""
    evaluation = {name: value for name, value in row.items() if name.startswith(names.EVALUATION)}
    if rest := {name: value for name, value in row.items() if name not in evaluation}:
        yield step, rest
    if evaluation:
        yield int(evaluation.get(names.EVALUATION_VERSION, step)), evaluation


def _allowed_name(name: str) -> str:
    """The name with characters that mlflow allows: letters, digits, and _ - . : / and blanks; others become _."""
    return re.sub(r'[^\w\-.:/ ]', '_', name)


# Feeds a tracker with a run: config, rows, evaluations, end. Its failures never stop the run.
#
# Rows are sent in a thread, as in telemetry.hook. WORKDIR/tracker.json keeps the token by which a resumed run finds
# itself in the tracker, and the last step sent.


FIELD = 'telemetry.tracker'
FILE = 'tracker.json'  # in the workdir
NOTHING_SENT = -1  # less than 0, the step of the evaluation before training
_FIX = 'remove it: the run then begins anew in the tracker'
_MOST_ATTEMPTS = 3  # per row; then it is given up: the tracker may refuse this row


def read_token(workdir: pathlib.Path, kind: str, project: str) -> str:
    """The token of the run in this tracker and project, '' if it is not there yet; raises FileError."""
    return str(read_progress(workdir / FILE, {'tracker': kind, 'project': project}, _FIX).get('token', ''))


class TrackerFeed(RowThread):
    """Sends one row after another, each once; first the rows of an earlier attempt that the tracker lacks.

    A row that cannot be sent is retried with the next one, so a tracker out of reach for a while misses no row unless
    _MOST_ATTEMPTS of it fail. Rows not sent when the run ends are counted, and a resumed run sends them.
    """

    def __init__(self, tracker: Tracker, kind: str, run: TrackedRun):
        super().__init__(f'{FIELD}={kind}', run.workdir)
        self._tracker, self._kind, self._run = tracker, kind, run
        known = read_progress(run.workdir / FILE, self._receiver(), _FIX)
        self._last_step = int(known.get('last_step', NOTHING_SENT))
        self._begun = False
        self._pending: collections.deque[tuple[int, Line]] = collections.deque()
        self._attempts = 0  # for the first row that waits
        self._ending: tuple[str, int, Line, Mapping[str, float], Sequence[pathlib.Path]] | None = None

    def facts(self) -> RowFacts:
        return {**super().facts(), 'failed': self._failed + len(self._pending)}

    def stop(self) -> None:
        """Ends the run in the tracker as stopped: `--resume` continues it."""
        self._ending = ('stopped', 0, {}, {}, ())
        self.close()

    def finish(self, step: int, scores: Line, summary: Mapping[str, float], pages: Sequence[pathlib.Path]) -> None:
        """Ends the run in the tracker as finished.

        Args:
          step: the last update.
          scores: scores of the evaluation after training; may be empty.
          summary: the headline of the report.
          pages: paths of the report; existing files are sent.
        """
        self._ending = ('finished', step, scores, summary, [page for page in pages if page.exists()])
        self.close()

    def _begin(self) -> None:
        self._attempt(self._connect)

    def _hand_over(self, step: int, metrics: Line) -> None:
        if step <= self._last_step:
            return
        self._calls += 1
        self._pending.append((step, metrics))
        if len(self._pending) > MOST_WAITING:
            self._give_up()
        self._attempt(self._send)

    def _end(self) -> None:
        state, step, scores, summary, pages = self._ending or ('failed', 0, {}, {}, ())
        if self._pending:
            self._attempt(self._send)
        if not self._begun:
            return
        if scores:
            self._attempt(functools.partial(self._tracker.log, step, finite(scores)))
        self._attempt(functools.partial(self._tracker.end, state, summary, pages))

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except (Exception, SystemExit) as error:  # a tracker must not end a run
            first = next(iter(str(error).strip().splitlines()), '')
            self._warn(f'{self._setting}: {type(error).__name__}: {first}'.rstrip(': '))

    def _connect(self) -> None:
        self._note_progress()  # the token is on the disk before the tracker knows it
        beginning = self._tracker.begin(self._run)
        self._begun = True
        if beginning.last_step is not None:
            self._last_step = beginning.last_step
        print(f'{self._kind}: project {self._run.project}, {beginning.place}', flush=True)

    def _send(self) -> None:
        if not self._begun:
            self._connect()
        while self._pending:
            step, metrics = self._pending[0]
            if step > self._last_step:
                self._attempts += 1
                try:
                    self._tracker.log(step, finite(metrics))
                except BaseException:
                    if self._attempts >= _MOST_ATTEMPTS:
                        self._give_up()
                    raise
                self._last_step = step
            self._pending.popleft()
            self._attempts = 0
            self._note_progress()

    def _give_up(self) -> None:
        self._pending.popleft()
        self._failed, self._attempts = self._failed + 1, 0

    def _receiver(self) -> dict[str, object]:
        return {'tracker': self._kind, 'project': self._run.project}

    def _note_progress(self) -> None:
        noted = {**self._receiver(), 'token': self._run.token, 'last_step': self._last_step}
        files.write_json(self._workdir / FILE, noted)
