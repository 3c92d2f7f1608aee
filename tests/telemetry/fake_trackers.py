"""wandb, mlflow and trackio as far as trackers.py uses them; a store outlives the process that is killed."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import pytest


class Store:
    """What a library holds of one run, and how it behaves."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.config: dict[str, Any] = {}
        self.begun: list[dict[str, Any]] = []
        self.ended: list[Any] = []
        self.summary: dict[str, Any] = {}
        self.pages: list[str] = []
        self.failing: set[int] = set()  # numbers of calls of log, from 1, that raise
        self.calls = 0
        self.run_id: str = ''

    def log(self, step: int, row: dict[str, Any]) -> None:
        self.calls += 1
        if self.calls in self.failing:
            raise ConnectionError('no route to host')
        self.rows.append((step, row))

    def steps(self, name: str = 'reward/mean') -> list[int]:
        return [step for step, row in self.rows if name in row]


def install(name: str, monkeypatch: pytest.MonkeyPatch, directory: Any) -> Store:
    store = Store()
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, module)
    {'wandb': _wandb, 'trackio': _trackio, 'mlflow': _mlflow}[name](store, module, monkeypatch, directory)
    return store


def _wandb(store: Store, module: Any, monkeypatch: pytest.MonkeyPatch, directory: Any) -> None:
    def init(**options: Any) -> Any:
        store.begun.append(options)
        store.config = options['config']
        run = types.SimpleNamespace(summary=store.summary, dir=str(directory), url='https://wandb/run')
        run.step = max((step for step, _ in store.rows), default=-1) + 1
        run.log = lambda row, step: store.log(step, row)
        run.define_metric = lambda *names, **options: None
        run.finish = lambda exit_code: store.ended.append(exit_code)
        return run

    module.init, module.Settings = init, lambda **options: options
    module.login = lambda **options: True
    monkeypatch.delenv('WANDB_MODE', raising=False)


def _trackio(store: Store, module: Any, monkeypatch: pytest.MonkeyPatch, directory: Any) -> None:
    def init(**options: Any) -> Any:
        store.begun.append(options)
        store.config = options['config']
        following = max((step for step, _ in store.rows), default=-1) + 1
        log = lambda row, step=None: store.log(step, row) if step is not None else store.summary.update(row)
        return types.SimpleNamespace(log=log, finish=lambda: store.ended.append('finished'), _next_step=following)

    module.init, module.Markdown = init, lambda text: text


def _mlflow(store: Store, module: Any, monkeypatch: pytest.MonkeyPatch, directory: Any) -> None:
    entities = types.ModuleType('mlflow.entities')
    point = lambda key, value, timestamp, step: types.SimpleNamespace(key=key, value=value, step=step)
    entities.Metric, entities.Param = point, lambda key, value: (key, value)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, 'mlflow.entities', entities)

    class Client:
        def get_experiment_by_name(self, name: str) -> None: ...
        def create_experiment(self, name: str) -> str:
            return '1'

        def search_runs(self, experiments: Any, text: str) -> list[Any]:
            known = types.SimpleNamespace(
                info=types.SimpleNamespace(run_id='r'), data=types.SimpleNamespace(params=store.config)
            )
            return [known] if store.run_id and store.run_id in text else []

        def create_run(self, number: str, run_name: str, tags: dict[str, str]) -> Any:
            store.begun.append({'name': run_name, **tags})
            store.run_id = tags['areal_jax.token']
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id='r'))

        def get_metric_history(self, run: str, name: str) -> list[Any]:
            return [types.SimpleNamespace(step=step) for step, row in store.rows if name in row]

        def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
            store.config.update(dict(params))
            by_step: dict[int, dict[str, float]] = {}
            for metric in metrics:
                by_step.setdefault(metric.step, {})[metric.key] = metric.value
            for step, row in by_step.items():
                store.log(step, row)

        def log_metric(self, run: str, name: str, value: float) -> None:
            store.summary[name] = value

        def log_artifact(self, run: str, path: str) -> None:
            store.pages.append(path)

        def set_terminated(self, run: str, status: str) -> None:
            store.ended.append(status)

        def update_run(self, run: str, status: str) -> None:
            store.begun.append({'resumed': status})

    module.MlflowClient, module.get_tracking_uri = Client, lambda: 'sqlite:///mlflow.db'
