"""From the configs of arms to the metrics and weights of each: `train_arms(arms)`.

Draws weights and prompts as single runs with these configs would, compiles one program, and runs it to the last update.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.app.model.model import build_model
from areal_jax.app.parts.part_settings import build_schedule
from areal_jax.app.parts.workflow_builder import build_frictions
from areal_jax.config import TrackedConfig
from areal_jax.control.frictions import Frictions
from areal_jax.publication.manifest import weights_sha256
from areal_jax.studies.arms.answer_generation import draw_faults
from areal_jax.studies.arms.arm import Arm, require_one_program
from areal_jax.studies.arms.arm_training import State, Steps, initial_state, make_lines, make_program, open_writer, plan
from areal_jax.studies.arms.problems import Problems, draw_problems
from areal_jax.studies.arms.setting import make_constants, make_setting
from areal_jax.telemetry.metrics import Line
from areal_jax.types import Tree

UPDATES_PER_CALL = 20


@dataclasses.dataclass(frozen=True)
class ArmResult:
    """What one arm came to."""

    arm: Arm
    lines: Sequence[Line]  # the metrics of every update, as in metrics.jsonl
    params: Tree  # numpy, the weights after the last update

    @property
    def weights_sha256(self) -> str:
        """As in the report of a run."""
        return weights_sha256(self.params)


class ArmsProgram:
    """Arms of one program, with their state on the device.

    Raises ConfigError, naming arm and field, for arms that one program cannot train.
    """

    def __init__(self, arms: Sequence[Arm], updates_per_call: int = UPDATES_PER_CALL):
        require_one_program(arms)
        self.arms = tuple(arms)
        weights, problems = _prepare(self.arms)
        constants = make_constants(self.arms)
        self._schedules = [build_schedule(TrackedConfig(arm.config)) for arm in self.arms]
        self.setting = make_setting(self.arms)
        self.state: State = jax.vmap(lambda params: initial_state(self.setting, params))(weights)
        self.calls: Sequence[Steps] = plan(self.setting, updates_per_call)
        self.fixed = jax.device_put((constants, problems))
        self.compiled: jax.stages.Compiled | None = None
        self._next_call = 0

    @property
    def finished(self) -> bool:
        return self._next_call == len(self.calls)

    @property
    def trains_throughout(self) -> bool:
        """Whether every step of the next call is an update of every arm."""
        return not self.finished and bool(self.calls[self._next_call].trains.all())

    def compile(self) -> None:
        """Compiles the program; the first `advance` does where this was not called."""
        program = make_program(self.setting, len(self.arms))
        self.compiled = program.lower(self.calls[0], *self.fixed, self.state).compile()

    def advance(self) -> list[list[Line]]:
        """The next call of the program; returns the metrics of the updates that it made, of each arm."""
        if self.compiled is None:
            self.compile()
        assert self.compiled is not None
        steps = self.calls[self._next_call]
        self.state, sums = self.compiled(steps, *self.fixed, self.state)
        self._next_call += 1
        numbers = steps.number[steps.trains]
        made = {name: np.asarray(values)[:, steps.trains] for name, values in sums.items()}
        of_arm = lambda index: {name: values[index] for name, values in made.items()}
        return [make_lines(self.setting, s, of_arm(index), numbers) for index, s in enumerate(self._schedules) if s]

    def params(self, index: int) -> Tree:
        """The weights of one arm, numpy."""
        return jax.tree.map(lambda leaf: np.asarray(leaf[index]), self.state.params)


def train_arms(
    arms: Sequence[Arm],
    workdir: pathlib.Path | None = None,
    *,
    updates_per_call: int = UPDATES_PER_CALL,
    announce: Callable[[int, int], None] = lambda done, total: None,
) -> list[ArmResult]:
    """Trains the arms to their last update, as one program; results in the order of the arms.

    Args:
      workdir: gets a directory for each arm, by its name, with config.json and metrics.jsonl; None = nothing is
        written.
      updates_per_call: updates between two times at which metrics are read and written.
      announce: called with the number of updates done, and of all.

    Raises ConfigError, naming arm and field, for arms that one program cannot train, and where the directory of an arm
    holds metrics already.
    """
    program = ArmsProgram(arms, updates_per_call)
    lines: list[list[Line]] = [[] for _ in arms]
    with contextlib.ExitStack() as stack:
        places = [workdir / arm.name for arm in arms] if workdir else []
        opened = [open_writer(place, arm) for place, arm in zip(places, arms, strict=False)]
        writers = [stack.enter_context(contextlib.closing(writer)) for writer in opened]
        while not program.finished:
            for index, made in enumerate(program.advance()):
                for line in made:
                    lines[index].append(line)
                    if writers:
                        writers[index].write(len(lines[index]), line)
            announce(len(lines[0]), program.setting.updates)
    return [ArmResult(arm, lines[index], program.params(index)) for index, arm in enumerate(arms)]


def _prepare(arms: Sequence[Arm]) -> tuple[Tree, Problems]:
    """The initial weights and the problems of all arms, stacked; arms with one seed share what it draws."""
    weights: dict[tuple[int, float, float], Tree] = {}
    model_sizes: dict[tuple[int, float, float], int] = {}  # tokens of the vocabulary
    problems: dict[int, Problems] = {}
    keys = []
    frictions: list[Frictions | None] = []
    for arm in arms:
        config = TrackedConfig(arm.config)
        key = config.run.seed, config.model.init_scale, config.model.embedding_scale
        if key not in weights:
            model = build_model(config)
            weights[key], model_sizes[key] = model.params, model.vocab_size
            if key[0] not in problems:
                problems[key[0]] = draw_problems(config, model.tokenizer)
        keys.append(key)
        frictions.append(build_frictions(config, model_sizes[key]))
    own = _with_faults(arms, [problems[seed] for seed, *_ in keys], frictions)
    return _stack([weights[key] for key in keys]), _stack(own)


def _with_faults(
    arms: Sequence[Arm], problems: Sequence[Problems], frictions: Sequence[Frictions | None]
) -> list[Problems]:
    sizes = arms[0].config.rollout.group_size, arms[0].config.rollout.max_new_tokens
    faults = draw_faults(frictions, [np.asarray(own.prompts) for own in problems], *sizes)
    return [own if faults is None else own._replace(faults=faults[at]) for at, own in enumerate(problems)]


def _stack(trees: Sequence[Tree]) -> Tree:
    """Arrays of all arms, on the device."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
