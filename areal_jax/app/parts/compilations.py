"""Compiled programs of this process: their cache, warnings of slow ones, a trace of some updates."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.monitoring
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from ml_collections import config_dict

from areal_jax.app.parts.host import LearnerAround
from areal_jax.config import TrackedConfig
from areal_jax.config.agent_fields import find_sandbox_warnings
from areal_jax.config.fields import ConfigError
from areal_jax.config.kinds import find_server
from areal_jax.config.loss import find_objective_warnings
from areal_jax.config.training import find_schedule_warnings
from areal_jax.learning.programs import AHEAD
from areal_jax.protocols import Learner
from areal_jax.types import TrajectoryGroup

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
    """Inside, jax keeps compiled programs in run.compilation_cache; if that is '', jax's own setting stays.

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


# Warnings on stderr before the first update: values that are probably a mistake, attention backends that fail here.


_DETERMINISTIC = '--xla_gpu_deterministic_ops=true'
_BFLOAT16_COST = 1.6  # measured with SmolLM2-135M and AVX-512 BF16: docs/log/


def print_warnings(config: config_dict.ConfigDict) -> None:
    for warning in (*find_warnings(config), *find_device_warnings(config, jax.default_backend())):
        print(f'warning: {warning}', file=sys.stderr, flush=True)


def print_passed_over(field: str, reasons: Sequence[str]) -> None:
    """Prints why 'auto' in the field did not choose a faster backend; `reasons` has one entry per failed backend."""
    for reason in reasons:
        print(f"warning: {field}='auto' passes over a backend: {reason}", file=sys.stderr, flush=True)


def find_warnings(c: config_dict.ConfigDict) -> Iterator[str]:
    """Yields one sentence per warning."""
    yield from find_objective_warnings(c)
    yield from find_sandbox_warnings(c)
    yield from find_schedule_warnings(c)


def find_device_warnings(c: config_dict.ConfigDict, platform: str) -> Iterator[str]:
    """Yields a warning for each setting that is slow on the platform, or needs a flag there to repeat bit for bit."""
    if platform == 'cpu' and c.publication.dtype == 'bfloat16' and find_server(c.rollout.server).in_process:
        yield (
            f"publication.dtype='bfloat16' on a CPU: a step of one row takes about {_BFLOAT16_COST} times as long as "
            "in float32, and more where the processor has no instructions for it; use publication.dtype='float32', or "
            "rollout.weights='int8' with it"
        )
    if platform == 'gpu' and c.run.clock == 'virtual' and _DETERMINISTIC not in os.environ.get('XLA_FLAGS', ''):
        yield (
            f"run.clock='virtual' repeats bit for bit on a GPU only with XLA_FLAGS='{_DETERMINISTIC} "
            "--xla_gpu_enable_triton_gemm=false', set before the start: its kernels add up in any order otherwise"
        )


# A trace of some updates by jax's profiler, in WORKDIR/profile (telemetry.profile_steps).


DIRECTORY = 'profile'


class TracedLearner(LearnerAround):
    """A learner that records its updates `first` to `last` in one trace, with all other work of the process meanwhile.

    The trace begins with the first of these updates that this attempt makes, and ends after the last one, or at `close`
    if the run ends before it. Python functions are left out: recording each call would slow the host's loop.
    """

    def __init__(self, learner: Learner, first: int, last: int, directory: pathlib.Path):
        super().__init__(learner)
        self._first, self._last, self._directory = first, last, directory
        self._recording = False

    def update(self, groups: Sequence[TrajectoryGroup], version: int) -> Mapping[str, float]:
        """See protocols.Learner; `version` + 1 is the number of the update."""
        number = version + 1
        if self._first <= number <= self._last and not self._recording:
            self._start()
        with jax.profiler.StepTraceAnnotation('update', step_num=number):
            metrics = super().update(groups, version)
        if number == self._last:
            self.close()
        return metrics

    def close(self) -> None:
        """Writes the trace if one is being recorded."""
        if self._recording:
            self._recording = False
            jax.profiler.stop_trace()

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(str(self._directory), profiler_options=options)
        self._recording = True
