"""The worker of a verifier in a replay: no process, since its replies are in the event log."""

from __future__ import annotations

from typing import NoReturn

from areal_jax.files import JsonObject
from areal_jax.workers.worker_process import WorkerProcess


class RecordedWorker(WorkerProcess):
    """A WorkerProcess that is never asked: the replay clock makes no call."""

    def __init__(self, scorer: str, memory_mb: int):
        self.scorer = scorer
        self.is_ready = False
        self._is_killed = False

    @property
    def is_killed(self) -> bool:
        return self._is_killed

    def wait_until_ready(self, end_s: float) -> None:
        self.is_ready = True

    async def become_ready(self) -> NoReturn:
        raise RuntimeError('a replay takes the replies of workers from its log')

    async def ask(self, request: JsonObject) -> NoReturn:
        raise RuntimeError('a replay takes the replies of workers from its log')

    def ask_at_once(self, request: JsonObject, end_s: float) -> NoReturn:
        raise RuntimeError('a replay takes the replies of workers from its log')

    def kill(self) -> None:
        self._is_killed = True

    def is_gone(self) -> bool:
        return self._is_killed

    def close(self, within_s: float = 0.0) -> None:
        self._is_killed = True
