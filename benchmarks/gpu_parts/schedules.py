"""One schedule of a run whose answers differ in length: tokens a second of updates, synchronous or asynchronous.

    python -m benchmarks.gpu_parts.schedules {sync,async} [--tiny] OUT

Both arms have one config but for staleness.eta (0, 2): random weights of the 1.5b shape, 128 answers an update on 64
slots, lengths lognormal(1024, 0.75) up to 4,096 (rollout.answer_lengths), which are the same in both arms to the token.
Timed is the part of the run from the publication of version FIRST to that of version LAST. The run has more updates, so
that an asynchronous arm is as full of unfinished answers at the end of this part as at its begin; it is ended there, or
when the part's time is nearly over.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
import time
from typing import Any

from areal_jax.app.run.reports import rebuild_report
from areal_jax.events.schema import FILE as EVENTS
from areal_jax.events.schema import Event
from areal_jax.files import read_json
from areal_jax.report.report import FILE as REPORT
from benchmarks.gpu_parts.cells import Cells, device_memory, run_part
from benchmarks.gpu_parts.compile import Compilations
from benchmarks.gpu_parts.run import build_config, describe, keep_records, open_run, pick
from benchmarks.gpu_parts.shapes import SHAPES, TINY, choose_remat, train_case
from benchmarks.timed_run import read_events

ETAS = {'sync': 0.0, 'async': 2.0}
FIRST, LAST = 1, 4  # versions: a wave of eta + 1 updates
_RESERVE_S = 15.0  # of the part's time, for its end
_ENGINE_BYTES = 14e9  # weights and cache of the engine, and a published version


class PartEnd(Exception):
    """Ends a run that has been measured; nothing is saved."""


def measure(cells: Cells, schedule: str, *, tiny: bool) -> None:
    shape = TINY if tiny else SHAPES['1.5b']
    with tempfile.TemporaryDirectory() as folder, Compilations() as compilations:
        workdir = pathlib.Path(folder, 'run')
        session = open_run(build_config(shape, fields(schedule, tiny), tiny), shape, workdir)
        cells.add('case', describe(session))
        timer = Timer(cells, workdir, float(os.environ.get('AREAL_JAX_GPU_LIMIT_S', 'inf')) - _RESERVE_S)
        session.program.parts.host.log.listeners.append(timer.on_event)
        try:
            session.train()
        except PartEnd as end:
            cells.add('end', str(end))
        finally:
            keep_records(workdir, schedule)
        cells.add('compile', compilations.numbers())
        cells.attempt('report', lambda: _read_report(workdir))
    if 'rate' not in cells.values:
        raise RuntimeError(f'version {FIRST + 1} was not published in time')


class Timer:
    """Adds the numbers of the timed part after every publication in it, and ends the run behind its last one."""

    def __init__(self, cells: Cells, workdir: pathlib.Path, limit_s: float):
        self._cells, self._events, self._deadline = cells, workdir / EVENTS, time.monotonic() + limit_s

    def on_event(self, event: Event) -> None:
        if event['kind'] == 'publish' and event['version'] > FIRST:
            self._cells.add('rate', read_rate(self._events))
            if event['version'] >= LAST:
                raise PartEnd(f'version {LAST} was published')
        if time.monotonic() > self._deadline:
            raise PartEnd('the time of the part was over')


def read_rate(events: pathlib.Path) -> dict[str, float]:
    """Trained tokens a second between the publications of FIRST and of the newest version."""
    seconds, tokens, waited_s = read_events(events, FIRST)
    return {
        'seconds': seconds,
        'answer_tokens': tokens,
        'tokens_per_second': tokens / seconds,
        'publication_wait_s': waited_s,
    }


def fields(schedule: str, tiny: bool) -> dict[str, object]:
    """What an arm sets: all but `staleness.eta` is that of both."""
    limit = (device_memory() or {}).get('limit_bytes')
    return {
        'run.steps': LAST + 1 + int(max(ETAS.values())),  # admission is open up to the last version that is timed
        'rollout.ignore_eos': True,
        'rollout.answer_lengths': 'lognormal(16, 0.75)' if tiny else 'lognormal(1024, 0.75)',
        'rollout.max_new_tokens': 64 if tiny else 4096,
        'rollout.context_tokens': 80 if tiny else 4160,
        'rollout.slots': 8 if tiny else 64,
        'rollout.prefill_buckets': (128,) if tiny else (256, 8192),
        'rollout.group_size': 4 if tiny else 8,
        'rollout.max_running_groups': 0,  # as many as fill the slots
        'staleness.eta': ETAS[schedule],
        'buffer.capacity': 64,
        'learner.groups_per_update': 4 if tiny else 16,
        'learner.row_tokens': 128 if tiny else 16_384,
        'learner.row_loss_tokens': 128 if tiny else 16_384,
        'learner.remat': choose_remat(train_case('1.5b', tiny), limit and int(limit - _ENGINE_BYTES)),
    }


def _read_report(workdir: pathlib.Path) -> dict[str, Any]:
    """Of the run up to its end, which was no regular one."""
    rebuild_report(workdir, plots=False)
    return pick(read_json(workdir / REPORT))


if __name__ == '__main__':
    run_part(measure)
