"""The examples of docs/tracking.md do with a tracker what the page says. The trackers here note what they are told."""

from __future__ import annotations

import pathlib
import re
import sys
import types

import pytest

from areal_jax.app.workdir.run_list import DAMAGED, FAILED, FINISHED, KILLED, NEVER_BEGAN, RUNNING, STOPPED
from areal_jax.config.declarations import choices
from areal_jax.plugins import load_function
from areal_jax.telemetry.hook import FIELD, MetricsHook
from areal_jax.telemetry.trackers import TRACKERS

PAGE = pathlib.Path(__file__).parent.parent / 'docs' / 'tracking.md'
EXAMPLES = re.findall(r'```python\n(.*?)```', PAGE.read_text(), flags=re.DOTALL)


class Tracker(types.ModuleType):
    """A module with wandb's `init`, whose result has `log`."""

    def __init__(self, name: str):
        super().__init__(name)
        self.started: list[dict[str, object]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []

    def init(self, **options: object) -> Tracker:
        self.started.append(options)
        return self

    def log(self, row: dict[str, float], *, step: int) -> None:
        self.logged.append((step, row))


def follow(example: str, workdir: pathlib.Path) -> dict[str, int]:
    """Hands two rows to the example, as a run does."""
    file = workdir / 'track.py'
    file.write_text(example)
    (workdir / 'config.json').write_text('{"staleness": {"eta": Infinity}}')
    hook = MetricsHook(load_function(f'{file}:log', FIELD), f'{file}:log', workdir)
    hook.start([])
    hook.put(1, {'reward/mean': 0.25})
    hook.put(2, {'reward/mean': 0.5})
    hook.close()
    facts = hook.facts()
    return {'calls': facts['calls'], 'failed': facts['failed']}


def test_the_smallest_example_prints(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    assert follow(EXAMPLES[0], tmp_path) == {'calls': 2, 'failed': 0}
    assert capsys.readouterr().out == '1 0.25\n2 0.5\n'


def test_a_tracker_is_started_once_and_gets_every_row(tmp_path: pathlib.Path, monkeypatch):
    tracker = Tracker('wandb')
    monkeypatch.setitem(sys.modules, 'wandb', tracker)
    assert 'import wandb\n' in EXAMPLES[1]
    assert follow(EXAMPLES[1], tmp_path) == {'calls': 2, 'failed': 0}
    (started,) = tracker.started
    assert started['config'] == {'staleness': {'eta': float('inf')}}
    assert started['id'] == tmp_path.name
    assert tracker.logged == [(1, {'reward/mean': 0.25}), (2, {'reward/mean': 0.5})]


def test_the_page_names_every_tracker_and_its_variable():
    for kind, tracker in TRACKERS.items():
        assert f'| `{kind}` |' in PAGE.read_text()
        assert tracker.project_variable in PAGE.read_text()
    assert choices('telemetry.tracker') == ('none', *TRACKERS)


def test_the_page_names_every_state_of_a_run():
    for state in (RUNNING, FINISHED, STOPPED, KILLED, FAILED, NEVER_BEGAN, DAMAGED):
        assert f'`{state}`' in PAGE.read_text()
