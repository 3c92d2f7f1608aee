"""A real run of one process whose devices move between generation and training: what each move costs, what holds.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m benchmarks.reallocation

configs/tiny_cpu.py on eight virtual devices, on the real clock, with a plan of six moves (`--auto`: moves by measured
seconds instead). Answers shorten while the policy learns to end them. Eight devices that share the cores of a machine
have their work however they are split: the seconds are those of the moves, no gain is to be had here.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
from typing import Any

from areal_jax.app.library import build_run
from areal_jax.app.run.replay import replay
from areal_jax.app.workdir.records import read_workdir
from areal_jax.report.event_log import load_events
from areal_jax.report.rules.log_rules import Limits, find_violation
from areal_jax.telemetry.metrics import read_metrics
from areal_jax.telemetry.names import TIME
from configs.tiny_cpu import get_config

STEPS = 60
PLAN = {5: ('fsdp=4', 4), 10: ('data=1', 7), 20: ('fsdp=2', 6), 30: ('fsdp=4', 4), 40: ('fsdp=2', 3), 50: ('fsdp=4', 4)}
_PARTS = ('wait', 'leave', 'learner', 'join')


def build_config(directory: pathlib.Path, auto: bool) -> Any:
    """The run: `directory` gets the plan."""
    plan = directory / 'plan.jsonl'
    lines = [{'update': u, 'learner': learner, 'engines': f'{n} x tensor=1'} for u, (learner, n) in PLAN.items()]
    plan.write_text('\n'.join(map(json.dumps, lines)))
    config = get_config()
    fields = {
        'run.steps': STEPS, 'run.export': False, 'cluster.learner': 'fsdp=2', 'cluster.engines': '6 x tensor=1',
        'cluster.reallocate': 'auto' if auto else f'plan({plan})', 'learner.rows_per_microbatch': 4,
        'rollout.slots': 4, 'rollout.max_running_groups': 0, 'evaluation.problems': 0, 'checkpoint.every': 20,
        'telemetry.tensorboard': False, 'telemetry.plots': False, 'telemetry.progress': False,
    }  # fmt: skip
    config.update_from_flattened_dict(fields)
    return config


def measure(auto: bool, replays: bool) -> dict[str, Any]:
    """Runs, checks every rule of the log, and replays."""
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        config, workdir = build_config(directory, auto), directory / 'run'
        with build_run(config, workdir) as run:
            report = run.train()
        assert report is not None
        events = load_events(workdir / 'events.jsonl')
        lengths = [event['tokens'] for event in events if event['kind'] == 'finish']
        rows = read_metrics(workdir / 'metrics.jsonl')
        found = {
            'moves': [event for event in events if event['kind'] == 'reallocate'],
            'violation': find_violation(events, Limits.of(config.to_dict())),
            'discarded': sum(event.get('discarded', 0) for event in events if event['kind'] == 'decode'),
            'generated': sum(event['tokens'] for event in events if event['kind'] == 'decode'),
            'answered': sum(lengths),
            'mean_tokens_first_last': [sum(part) / len(part) for part in (lengths[:200], lengths[-200:])],
            'updates': len(rows),
            'seconds': rows[-1][TIME],
        }
        if replays:
            outcome = replay(read_workdir(workdir), directory / 'replayed', {}, print)
            found['replay_is_equal'] = outcome['weights_sha256'] == report['weights_sha256']
        return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--auto', action='store_true', help='move by measured seconds')
    parser.add_argument('--replay', action='store_true', help='replay the run, and compare its weights')
    arguments = parser.parse_args()
    found = measure(arguments.auto, arguments.replay)
    print('update  from -> to  left joined moved | seconds: wait leave learner join | whole')
    for move in found.pop('moves'):
        seconds = ' '.join(f'{move[f"{part}_seconds"]:.3f}' for part in _PARTS)
        print(
            f'{move["update"]:3}  {move["from_learner"]} | {move["from_engines"]} -> {move["learner"]} | '
            f'{move["engines"]}  {len(move["left"])} {len(move["joined"])} {move["moved"]} | {seconds} | '
            f'{move["seconds"]:.3f}; busy learner {move["busy_learner"]:.3f} engine {move["busy_engines"]:.3f} of '
            f'{move["period"]:.3f}'
        )
    print(json.dumps(found))


if __name__ == '__main__':
    main()
