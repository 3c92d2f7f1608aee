"""Compiled programs: where they are kept between runs, and how many XLA compiles during this one."""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections.abc import Iterator

import jax
import jax.monitoring
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from areal_jax.config import TrackedConfig
from areal_jax.config.ranges import ConfigError
from areal_jax.learning.programs import AHEAD

EVENT = '/jax/core/compile/backend_compile_duration'


class CompilationCounter:
    """Programs compiled since the counter was made, but for those of the thread `AHEAD`, which nobody waits for.

    Use it as a context manager: it listens while inside.
    """

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def __enter__(self) -> CompilationCounter:
        jax.monitoring.register_event_duration_secs_listener(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._note)

    def reset(self) -> None:
        self.count, self.seconds = 0, 0.0

    def _note(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == EVENT and threading.current_thread().name != AHEAD:
            self.count += 1
            self.seconds += duration_secs


@contextlib.contextmanager
def use_compilation_cache(config: TrackedConfig) -> Iterator[None]:
    """Inside, jax keeps compiled programs in run.compilation_cache; raises ConfigError if it cannot be written."""
    if not (cache := config.run.compilation_cache):
        yield
        return
    directory = pathlib.Path(cache).absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f'run.compilation_cache={cache!r} is no directory ({error.strerror}); use another') from error
    before = jax.config.values['jax_compilation_cache_dir']
    _set_cache(str(directory))
    try:
        yield
    finally:
        _set_cache(before)


def _set_cache(directory: str | None) -> None:
    jax.config.update('jax_compilation_cache_dir', directory)
    reset_cache()  # jax opens the directory once, at the first compilation of the process
