"""A side of arms.py: 'together' trains all arms in one program, 'single' makes runs one after another."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from areal_jax.app.library import LOOP
from areal_jax.app.run.run import Run
from areal_jax.studies.arms.arm import Arm
from areal_jax.studies.arms.arm_training import ArmsProgram
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import Line, number
from benchmarks.arms import arm_config
from benchmarks.sides import Call, Start, Stopwatch, serve


def prepare(arguments: dict[str, Any]) -> Start:
    arms = [Arm(name, arm_config(fields)) for name, fields in arguments['arms'].items()]
    return _together(arms, arguments['updates']) if arguments['side'] == 'together' else _single(arms)


def _together(arms: list[Arm], updates: int) -> Start:
    """A call is one call of the program: the next `updates` updates of every arm."""

    def start() -> tuple[Call, Any]:
        program = ArmsProgram(arms, updates_per_call=updates)
        while not program.trains_throughout:
            program.advance()  # compiles, and generates what the longest lag needs
        program.advance()  # the first call of a kind finds its memory cold

        def call() -> Mapping[str, float]:
            watch = Stopwatch()
            watch.start()
            made = program.advance()
            watch.stop()
            return _describe([line for lines in made for line in lines]) | watch.parts()

        return call, lambda: {'arms': len(arms), 'calls': len(program.calls)}

    return start


def _single(arms: list[Arm]) -> Start:
    """A call is a run of every arm, timed from the first admission to the last update: nothing else is counted."""

    def start() -> tuple[Call, Any]:
        directory = tempfile.TemporaryDirectory()
        jax.config.update('jax_enable_compilation_cache', True)  # sides.py turns it off, to measure compilation

        def call() -> Mapping[str, float]:
            watch, lines = Stopwatch(), []
            for arm in arms:
                _run(arm, pathlib.Path(directory.name), watch, lines)
            return _describe(lines) | watch.parts()

        return call, lambda: {'runs': len(arms)}

    return start


def _run(arm: Arm, cache: pathlib.Path, watch: Stopwatch, lines: list[Line]) -> None:
    config = arm.config.copy_and_resolve_references()
    config.run.compilation_cache = str(cache)  # the first run compiles for all

    def note(step: int, line: Line) -> None:
        lines.append(line)
        if step == config.run.steps:
            watch.stop()

    with tempfile.TemporaryDirectory() as workdir:
        run = Run(LOOP, config, pathlib.Path(workdir) / 'run')
        parts = run.program.parts
        parts.host.log.listeners.append(lambda event: watch.start() if event['kind'] == 'admit' else None)
        parts.metrics.listeners.append(note)
        run.train()


def _describe(lines: Sequence[Line]) -> dict[str, float]:
    """Over updates: the tokens generated and the mean reward."""
    total = lambda name: sum(number(line, name) or 0.0 for line in lines)
    return {'tokens': total(names.TOKENS_GENERATED), 'reward': total(names.REWARD_MEAN) / len(lines)}


if __name__ == '__main__':
    serve(prepare)
