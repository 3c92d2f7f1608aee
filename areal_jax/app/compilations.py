"""Compiled programs: where they are kept between runs, and how many XLA compiles during this one."""

from __future__ import annotations

import pathlib

import jax
import jax.monitoring

from areal_jax.config import TrackedConfig
from areal_jax.config.ranges import ConfigError

EVENT = '/jax/core/compile/backend_compile_duration'


class CompilationCounter:
    """Programs compiled since the counter was made; use as a context manager, it listens while inside."""

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
        if event == EVENT:
            self.count += 1
            self.seconds += duration_secs


def use_compilation_cache(config: TrackedConfig) -> None:
    """Tells jax where compiled programs are kept; raises ConfigError for a directory that cannot be written."""
    if not (cache := config.run.compilation_cache):
        return
    directory = pathlib.Path(cache).absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f'run.compilation_cache={cache!r} is no directory ({error.strerror}); use another') from error
    jax.config.update('jax_compilation_cache_dir', str(directory))
