"""The tracker of a run, built from its config, and what a finished run tells it."""

from __future__ import annotations

import os
import pathlib
import secrets
from collections.abc import Mapping, Sequence

from areal_jax.app.sweep.sweep_directory import SWEEP
from areal_jax.app.workdir.run_directory import Report
from areal_jax.config import TrackedConfig
from areal_jax.errors import UserError
from areal_jax.telemetry.trackers import FIELD, TRACKERS, TrackedRun, Tracker, TrackerFeed, read_token

_PROJECT = 'areal_jax'
# of report.json: reinforcement learning, then supervised training
_HEADLINE = (
    'steps', 'wall_seconds', 'reward.first', 'reward.last', 'accuracy.greedy.before.mean', 'accuracy.greedy.after.mean',
    'accuracy.sampled.before.mean', 'accuracy.sampled.after.mean', 'accuracy.sampled.gain.mean',
    'accuracy.sampled.gain.low', 'accuracy.sampled.gain.high', 'token_age.mean', 'tokens.generated', 'tokens.trained',
    'throughput.generate_tokens_per_second', 'throughput.train_tokens_per_second', 'peak_memory_bytes',
    'train_nll.first', 'train_nll.last', 'epochs', 'trained_tokens',
)  # fmt: skip


def build_tracker(config: TrackedConfig) -> Tracker | None:
    """Imports the library that telemetry.tracker names; None for 'none'. Raises UserError where the import fails."""
    kind = config.telemetry.tracker
    if kind == 'none':
        return None
    try:
        return TRACKERS[kind]()
    except Exception as error:  # an installation that is broken may raise anything
        said = ' '.join(str(error).split())
        raise UserError(
            f'{FIELD}={kind!r}: the package {kind} cannot be imported ({type(error).__name__}: {said}); install it '
            f"again with pip install 'areal_jax[{kind}]', or --config.{FIELD}=none"
        ) from error


def build_feed(tracker: Tracker, config: TrackedConfig, workdir: pathlib.Path) -> TrackerFeed:
    """Feeds the tracker with the run of a workdir; raises FileError for a tracker.json that is not whole."""
    kind = config.telemetry.tracker
    config.note_used(('telemetry.tracker_answers',))  # the report reads it from config.json
    project = config.telemetry.project or os.environ.get(tracker.project_variable) or _PROJECT
    own = workdir.resolve()
    run = TrackedRun(
        project=project,
        name=own.name,
        group=own.parent.name if (own.parent / SWEEP).exists() else '',
        token=read_token(workdir, kind, project) or secrets.token_hex(4),
        workdir=own,
        config=config.as_dict(),
    )
    return TrackerFeed(tracker, kind, run)


def headline(report: Report) -> dict[str, float]:
    """The numbers of a report that runs are compared by: 'summary/accuracy/sampled/gain/mean'."""
    found = {}
    for path in _HEADLINE:
        value: object = report
        for key in path.split('.'):
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, (int, float)):
            found[f'summary/{path.replace(".", "/")}'] = float(value)
    held_out = report.get('held_out_nll') or {}
    if pairs := report.get('held_out_pairs'):
        last = pairs[max(pairs, key=int)]
        found['summary/held_out_pair_accuracy/last'] = last['pair_accuracy']
    measured: Sequence[float] = [nll for nll in held_out.values() if nll is not None]
    return found | ({'summary/held_out_nll/last': measured[-1]} if measured else {})
