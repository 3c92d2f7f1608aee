"""Agents: rows of programs against what the engine drew, what their calls and forks cost, and whether they learn.

    python -m benchmarks.agents --before=CHECKOUT --out=benchmarks/results/agents.json

Parts (--parts=rows,prefill,chat,forks,learning,verifiers):

  rows      episodes of 5 turns of text through the client of openai, every second one streamed, SmolLM2-135M in float32
            at temperature 1, 8 slots, weights exchanged 5 times: differences of ids, versions and log-probs from what
            the engine got and drew; the learner's log-probs of every sampled token under its version; the same
            conversations rendered anew
  prefill   the same without an exchange: tokens prefilled over distinct ones
  chat      CPU seconds of server and renderer for a chat call with 8 turns of history, against --before, a checkout
            of a version that renders each call in a new process; the engine answers at once
  forks     CPU seconds of a program from its fork to the reply to its first call, agent.preload=openai
  learning  arithmetic in two turns with feedback, 16 updates: agent.function against an own workflow, gain and wall
  verifiers an environment of verifiers with a tool over MCP, 10 updates of 2 groups of 4 episodes from a start that
            imitates two updates of calls, its server killed once; needs launch/verifiers_environment.sh
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from areal_jax.app.process.setup import return_freed_memory
from areal_jax.errors import UserError
from areal_jax.native.compiled_library import keep_blocks
from benchmarks.options import Row, make_parser, report, run, show, split_choices
from benchmarks.ratios import spread
from benchmarks.sides import ROOT, Side, ask_in_turns

PARTS = ('rows', 'prefill', 'chat', 'forks', 'learning', 'verifiers')
_AGENTS = ROOT / 'benchmarks' / 'agent_parts' / 'two_turns.py'
_LEARNING = {
    'task.system_prompt': '', 'rollout.context_tokens': 144, 'rollout.block_tokens': 16, 'rollout.max_new_tokens': 32,
    'agent.max_turn_tokens': 16, 'learner.row_tokens': 512, 'learner.row_loss_tokens': 400, 'learner.row_buckets': '()',
    'rollout.max_running_groups': 0,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> Row:
    parser = make_parser(__doc__, turns=5)
    parser.add_argument('--parts', default=','.join(PARTS))
    parser.add_argument('--before', type=pathlib.Path, help='checkout whose chat calls are measured beside ours')
    options = parser.parse_args(arguments)
    parts = split_choices('parts', options.parts, PARTS)
    if 'chat' in parts and options.before is None:
        raise UserError('--parts has chat, but --before names no checkout')
    return report('agents', arguments, options, lambda: [_measure(part, options) for part in parts])


def _measure(part: str, options: Any) -> Row:
    measure: dict[str, Callable[[Any], Row]] = {
        'rows': measure_rows, 'prefill': measure_prefill, 'chat': measure_chat, 'forks': measure_forks,
        'learning': measure_learning, 'verifiers': measure_verifiers,
    }  # fmt: skip
    began = time.monotonic()
    row = {'part': part, **measure[part](options)}
    row['seconds'] = time.monotonic() - began
    show(row)
    return row


def measure_rows(options: Any) -> Row:
    from benchmarks.agent_parts.conversations import Conversations, Ran

    _set_up_memory()
    model, swaps = Conversations(options.seed), 1 if options.small else 5
    for version in range(1, swaps + 1):
        model.add_version(version)
    ran = Ran(model, 8 if options.small else 200, swaps)
    return {**ran.describe(), 'learner': ran.compare_with_learner(), 'anew': ran.count_lost_by_rendering()}


def measure_prefill(options: Any) -> Row:
    from benchmarks.agent_parts.conversations import Conversations, Ran

    _set_up_memory()
    return Ran(Conversations(options.seed), 4 if options.small else 16, swaps=0).describe()


def measure_chat(options: Any) -> Row:
    """CPU seconds a call, sides in turns; the ratio is ours over theirs."""
    arguments = {'turns': 8, 'calls': 4 if options.small else 40}
    module = 'benchmarks.side_chat'
    with (
        Side(sys.executable, module, arguments) as ours,
        Side(sys.executable, module, arguments, options.before) as before,
    ):
        runs = ask_in_turns({'ours': ours, 'before': before}, 1 if options.small else options.turns)
    seconds = {name: [run['checks']['part_cpu_s'] / arguments['calls'] for run in of] for name, of in runs.items()}
    ratios = [one / other for one, other in zip(seconds['ours'], seconds['before'], strict=True)]
    return {'cpu_s_a_call': {name: spread(of) for name, of in seconds.items()}, 'ratio': spread(ratios)}


def measure_forks(options: Any) -> Row:
    from benchmarks.agent_parts import forks

    return forks.measure_forks(3 if options.small else 20)


def measure_learning(options: Any) -> Row:
    steps = 2 if options.small else 16
    sides = {
        'own workflow': {'rollout.workflow': f'{_AGENTS}:workflow'},
        'program': {
            'rollout.workflow': 'program', 'agent.function': f'{_AGENTS}:program', 'rollout.episode_deadline_s': 200.0,
        },
    }  # fmt: skip
    found = {
        name: _train(_LEARNING | overrides | {'run.steps': steps, 'run.seed': options.seed})
        for name, overrides in sides.items()
    }
    return {'sides': found, 'wall_ratio': found['program']['wall_seconds'] / found['own workflow']['wall_seconds']}


def measure_verifiers(options: Any) -> Row:
    from benchmarks.agent_parts.product_run import measure_product_run

    return measure_product_run(imitated=2, steps=2 if options.small else 10, seed=options.seed)


def _train(overrides: dict[str, object]) -> Row:
    with tempfile.TemporaryDirectory() as directory:
        workdir = pathlib.Path(directory, 'run')
        flags = [f'--config.{name}={value}' for name, value in overrides.items()]
        command = [
            sys.executable,
            '-m',
            'areal_jax.main_train',
            '--config=configs/arithmetic.py',
            f'--workdir={workdir}',
        ]
        subprocess.run([*command, *flags], check=True, cwd=ROOT, stdout=sys.stderr)
        read = json.loads((workdir / 'report.json').read_text())
        return {name: read[name] for name in ('wall_seconds', 'accuracy', 'agents')}


def _set_up_memory() -> None:
    """As every command does."""
    return_freed_memory()
    keep_blocks()


if __name__ == '__main__':
    run('agents', main)
