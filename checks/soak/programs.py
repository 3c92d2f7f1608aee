"""Programs under kills: python -m checks.soak.programs --kills=10 --seed=0 --json=FILE [--steps=40].

A run of a tiny model, whose episodes are programs (talker.py) that lose a tenth of their connections, retry a tenth of
their calls, and sometimes die by SIGKILL, is killed by SIGKILL too, at a random moment behind a new checkpoint, and
resumed, until it has finished.

Exit code 0 only if the log keeps its rules (each token is in one place, areal-check-log), a replay is equal and starts
no program, every episode that ended well has the turns that its program got, none ended twice, and no retry got another
reply than its call. A kind of fault of which nothing was seen is a fault.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from areal_jax import files
from areal_jax.errors import ExitCode
from checks.command import describe_command, make_parser
from checks.logs import check_with_commands, newest_update
from checks.processes import RunningCommand, python

_LATEST_S = 1.5  # after the first new checkpoint of a start, in which the run is killed
_TALKER = pathlib.Path(__file__).with_name('talker.py')
_KINDS = ('reply', 'cut', 'retried', 'died', 'started again')


def train(workdir: pathlib.Path, steps: int, resumes: bool) -> RunningCommand:
    command = f'python {_TALKER} {workdir.parent}'
    overrides = {
        'run.steps': steps, 'rollout.workflow': 'program', 'rollout.episode_deadline_s': 100.0,
        'agent.command': command, 'agent.max_turn_tokens': 7, 'rollout.max_new_tokens': 24,
        'rollout.context_tokens': 96, 'learner.row_tokens': 192,
        'checkpoint.every': 1, 'checkpoint.keep': 3, 'evaluation.problems': 0, 'telemetry.plots': False,
        'telemetry.tensorboard': False, 'run.export': False,
    }  # fmt: skip
    flags = [f'--config.{name}={value}' for name, value in overrides.items()]
    flags += ['--resume'] if resumes else []
    command_line = python('-m', 'areal_jax.main_train', '--config=tiny_cpu', f'--workdir={workdir}', *flags)
    as_the_replay = {'XLA_FLAGS': os.environ.get('XLA_FLAGS', '')}  # other flags compile other bits
    return RunningCommand(command_line, workdir.parent, as_the_replay)


def run_through_kills(workdir: pathlib.Path, flags: argparse.Namespace) -> tuple[int, list[str]]:
    """(kills of the run, faults)."""
    chance, kills, end_s = random.Random(flags.seed), 0, time.monotonic() + flags.deadline_s
    while True:
        begun = newest_update(workdir) or 0
        with train(workdir, flags.steps, resumes=begun > 0) as run:
            while run.is_alive() and time.monotonic() < end_s:
                time.sleep(0.05)
                if kills < flags.kills and (newest_update(workdir) or 0) > begun:
                    time.sleep(chance.uniform(0, _LATEST_S))
                    break
            was_alive = run.is_alive()
            run.send(signal.SIGKILL)
            ending = run.wait()
        if was_alive:
            if time.monotonic() >= end_s:
                return kills, [f'the run has not finished within {flags.deadline_s:g} s, after {kills} kills']
            kills += 1
        elif ending.exit_code == ExitCode.FINISHED:
            return kills, []
        else:
            return kills, [f'the run ended with exit code {ending.exit_code}: {ending.stderr[-500:]}']


def compare(directory: pathlib.Path) -> tuple[dict[str, int], list[str]]:
    """(what programs noted, faults)."""
    notes = [json.loads(line) for line in (directory / 'replies.jsonl').read_text().splitlines()]
    counts = collections.Counter(note['what'] for note in notes)
    faults = [f'episode {n["episode"]}: a retry got another reply' for n in notes if n['what'] == 'another reply']
    replies: dict[str, set[tuple[int, str]]] = collections.defaultdict(set)
    for note in notes:
        if note['what'] == 'reply':
            replies[note['episode']].add((note['turn'], note['text']))
    ends = [json.loads(line) for line in (directory / 'run' / 'events.jsonl').read_text().splitlines()]
    ends = [event for event in ends if event['kind'] == 'finish']
    for end in ends:
        name = f'{end["draw"]}.{end["sample"]}'
        if end['reason'] == 'stop' and len({turn for turn, _ in replies[name]}) != end['turns']:
            faults.append(f'episode {name} has {end["turns"]} turns, and its program got {sorted(replies[name])}')
    seen = collections.Counter((end['draw'], end['sample']) for end in ends)
    faults += [f'episode {name} ended {times} times' for name, times in seen.items() if times > 1]
    restarted = sum(path.stat().st_size > 1 for path in directory.glob('starts.*'))
    return {**counts, 'episodes': len(ends), 'started again': restarted}, faults


def check(workdir: pathlib.Path) -> list[str]:
    """What areal-check-log and areal-replay find."""
    before = (workdir.parent / 'replies.jsonl').read_text()
    faults = check_with_commands(workdir, replay=True)
    if (workdir.parent / 'replies.jsonl').read_text() != before:
        faults.append('the replay started programs')
    return faults


def soak(flags: argparse.Namespace, directory: pathlib.Path) -> dict[str, Any]:
    began = time.monotonic()
    workdir = directory / 'run'
    kills, faults = run_through_kills(workdir, flags)
    counts: dict[str, int] = {}
    if not faults:
        counts, faults = compare(directory)
        faults += check(workdir)
        faults += [f'nothing was seen of: {kind}' for kind in _KINDS if not counts.get(kind)]
        faults += [] if kills else ['the run was never killed']
    return {'faults': faults, 'kills_of_the_run': kills, 'counts': counts, 'seconds': time.monotonic() - began}


def main(arguments: Sequence[str]) -> int:
    parser = make_parser('soak.programs', __doc__, seed_of='of the moments at which it is killed')
    parser.add_argument('--kills', type=int, default=10, help='of the run')
    parser.add_argument('--steps', type=int, default=40, help='updates')
    parser.add_argument('--deadline_s', type=float, default=600.0, help='of all starts together')
    flags = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        found = soak(flags, pathlib.Path(directory))
    print(json.dumps(found, indent=1))
    if flags.json:
        files.write_json(flags.json, {**describe_command(parser, arguments), **found})
    return 1 if found['faults'] else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
