"""Compiled programs: where they are kept between runs, and how many XLA compiles during this one."""

from __future__ import annotations

import contextlib
import os
import pathlib
import threading
from collections.abc import Iterator, Mapping

import jax
import jax.monitoring
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from areal_jax.config import TrackedConfig
from areal_jax.config.ranges import ConfigError
from areal_jax.learning.programs import AHEAD

_LEAST_NAME, _LEAST_S = 'jax_persistent_cache_min_compile_time_secs', 0.1
EVENT = '/jax/core/compile/backend_compile_duration'


class CompilationCounter:
    """Counts XLA compilations, except in the background thread `AHEAD`, which nothing waits for.

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
    """Inside, jax keeps compiled programs in run.compilation_cache; where that is '', jax's own setting stays.

    Programs that took 0.1 s are kept, unless JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS says otherwise: by default jax
    keeps programs that took 1 s, and few programs of a small model on a CPU take that long.

    Raises ConfigError if the directory cannot be written.
    """
    cache = config.run.compilation_cache
    settings: dict[str, str | float] = {}
    if cache:
        settings['jax_compilation_cache_dir'] = str(_make_directory(cache))
    if _LEAST_NAME.upper() not in os.environ:
        settings[_LEAST_NAME] = _LEAST_S
    before = {name: jax.config.values[name] for name in settings}
    _set(settings, reset=bool(cache))
    try:
        yield
    finally:
        _set(before, reset=bool(cache))


def _make_directory(cache: str) -> pathlib.Path:
    directory = pathlib.Path(cache).absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f'run.compilation_cache={cache!r} is no directory ({error.strerror}); use another') from error
    return directory


def _set(settings: Mapping[str, str | float | None], *, reset: bool) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    if reset:
        reset_cache()  # jax opens the directory once, at the first compilation of the process
