"""Trains arms from their configs to their metrics and weights: `train_arms(arms)`.

Draws weights and prompts as single runs with these configs would, compiles one program, and runs it to the last update.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax import files
from areal_jax.app.model.model import build_model
from areal_jax.app.parts.part_settings import build_schedule
from areal_jax.app.parts.task_builder import build_task
from areal_jax.app.parts.workflow_builder import build_frictions
from areal_jax.config import CONFIG, TrackedConfig
from areal_jax.config.fields import ConfigError
from areal_jax.control.frictions import Frictions
from areal_jax.control.lock_step import Schedule
from areal_jax.learning.objective.policy_loss import finalize_policy_metrics
from areal_jax.learning.optimizer import BRAKES, mean_step_metrics
from areal_jax.publication.manifest import weights_sha256
from areal_jax.rollout.decode.decode_rows import Array
from areal_jax.studies.arms.answer_generation import Answers, Faults, draw_faults, generate, take
from areal_jax.studies.arms.arm import Arm, require_one_program
from areal_jax.studies.arms.arm_update import Batch, Sums, update
from areal_jax.studies.arms.setting import Constants, Setting, make_constants, make_setting
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import FILE, Line, MetricsWriter, Value, merge
from areal_jax.text.tokenizer import Tokenizer
from areal_jax.types import Tree

_Sums = Mapping[str, float]  # of one update, see arm_update.Sums


def make_lines(
    setting: Setting, schedule: Schedule, sums: Mapping[str, np.ndarray], versions: np.ndarray
) -> list[Line]:
    """Makes the metrics of updates that start from `versions` [n], from their sums [n]."""
    one = lambda index: {name: float(values[index]) for name, values in sums.items()}
    age = lambda version: min(version, schedule.delay(version))
    return [make_line(setting, age(int(version)), one(index)) for index, version in enumerate(versions)]


def make_line(setting: Setting, age: int, sums: _Sums) -> Line:
    """Makes the metrics of an update on a batch of one age."""
    return merge(
        data=_data_metrics(setting, sums),
        ages=_age_metrics(setting, age, sums),
        loss=finalize_policy_metrics(sums),
        steps=_step_metrics(sums),
        mismatch=_mismatch_metrics(sums),
        frictions=_friction_metrics(setting, sums),
    )


def open_writer(workdir: pathlib.Path, arm: Arm) -> MetricsWriter:
    """Makes the directory of an arm with its config.json, and returns the writer of its metrics.jsonl.

    Raises ConfigError if the directory holds metrics already.
    """
    if (workdir / FILE).exists():
        raise ConfigError(f'{workdir} holds a run already: give another --workdir, or remove it')
    workdir.mkdir(parents=True, exist_ok=True)
    files.write_json(workdir / CONFIG, TrackedConfig(arm.config).as_dict())
    return MetricsWriter(workdir, tensorboard=False)


def _data_metrics(setting: Setting, sums: _Sums) -> dict[str, Value]:
    """The metrics of diagnostics.data_metrics; a reward is right symbols / (A + 1)."""
    count, unit = setting.groups * setting.group_size, setting.answer_tokens + 1
    mean = sums['right'] / count
    spread = max(sums['right_squares'] / count - mean**2, 0.0) ** 0.5
    generated = float(count * setting.answer_tokens)
    return {
        'update/groups': float(setting.groups),
        names.UPDATE_GROUPS: sums['kept'],
        names.UPDATE_FILTERED: setting.groups - sums['kept'],
        names.REWARD_MEAN: mean / unit,
        names.REWARD_STD: spread / unit,
        names.TOKENS_GENERATED: generated,
        names.TOKENS_TRAINED: _trained_tokens(setting, sums),
        names.GROUPS_TRAINED: sums['kept'],
    }


def _age_metrics(setting: Setting, age: int, sums: _Sums) -> dict[str, Value]:
    """The metrics of diagnostics.age_metrics; all tokens of a batch have one age."""
    trained = _trained_tokens(setting, sums)
    metrics: dict[str, Value] = {
        names.UPDATE_TOKENS: trained,
        names.UPDATE_TRAJECTORIES: sums['kept'] * setting.group_size,
        names.TOKENS_MASKED: 0.0,
        names.TOKEN_AGE_HISTOGRAM: [0.0] * age + [trained] if trained else [],
    }
    if trained:
        metrics |= {
            names.TOKEN_AGE_MEAN: float(age),
            names.TOKEN_AGE_MAX: float(age),
            names.VERSIONS_MEAN: 1.0,
            names.VERSIONS_MAX: 1.0,
        }
    return metrics


def _trained_tokens(setting: Setting, sums: _Sums) -> float:
    return sums['kept'] * setting.group_size * setting.answer_tokens


def _step_metrics(sums: _Sums) -> dict[str, Value]:
    """The metrics of the optimizer steps that were made, as in a single run."""
    made, skipped = sums['steps'], sums['skip_count']
    loss: dict[str, Value] = {}
    if made:
        loss = {
            'loss/value': sums['loss_sum'] / made,
            'loss/sequence_effective_sample_size': sums['sample_sizes'] / made,
        }
        loss |= {f'update/{name}': sums[name] / made for name in BRAKES if name in sums}
    return {**mean_step_metrics(made, skipped, sums['grad_norm'], sums['learning_rate']), **loss}


def _friction_metrics(setting: Setting, sums: _Sums) -> dict[str, Value]:
    """The counts of control/frictions.py; empty in a program without frictions."""
    counted = (names.FRICTION_ACTOR, names.FRICTION_REWARD, names.FRICTION_UNREWARDED)
    if 'friction_actor' not in sums:
        return {}
    found: dict[str, Value] = {name: sums[name.replace('/', '_')] for name in counted}
    if count := sums['friction_policy_count']:
        found[names.FRICTION_POLICY_REWARD] = sums['friction_policy_right'] / count / (setting.answer_tokens + 1)
    return found


def _mismatch_metrics(sums: _Sums) -> dict[str, Value]:
    count = sums['mismatch_count']
    if not count:
        return {names.MISMATCH_COUNT: 0.0}
    return {
        names.MISMATCH_COUNT: count,
        names.MISMATCH_MEAN: sums['mismatch_sum'] / count,
        names.MISMATCH_MAX: sums['mismatch_max'],
        names.MISMATCH_EXACT: sums['mismatch_exact'] / count,
    }


# The program of arms: updates in a loop on the device, arms side by side in blocks.
#
# With the schedule fixed(k), version max(0, v - k) generates the batch of update v. So an arm generates the batch of
# update v + k as soon as it has version v, and keeps k + 1 batches until their turn instead of k + 1 versions of the
# weights: the tokens and the noise are the same, and a batch is a small part of the weights. Its first k batches are
# generated before its first update. Steps of the loop are therefore numbered from -K, the longest delay of the
# program. With a schedule every(L), batches have all ages below L: the arm keeps the weights of the last version that
# is a multiple of L, generates with them, and no batch waits.


MOST_SIDE_BY_SIDE = 4  # arms in one vmap: results between two matrix products then stay in a CPU's cache


class State(NamedTuple):
    """State of one arm, or of all arms with a leading axis."""

    params: Tree
    optimizer: Tree
    waiting: Answers  # leaves [K + 1, B, G, A]; the batch of update v is at v mod (K + 1)
    held: Tree  # the weights that generate, if an arm holds a version; else None


class Steps(NamedTuple):
    """The actions of the steps of a call, equal for all arms."""

    number: Array  # int32 [C], the update, or from -K to -1 before the first
    generates: Array  # bool [C]
    trains: Array  # bool [C]


def plan(setting: Setting, per_call: int) -> list[Steps]:
    """The steps of every call. All calls have equally many; the last is filled up with steps that do nothing."""
    first, end = -setting.longest_delay, setting.updates
    number = np.arange(first, first + -(-(end - first) // per_call) * per_call, dtype=np.int32)
    generates = number < end - setting.shortest_delay
    trains = (number >= 0) & (number < end)
    calls = (x.reshape(-1, per_call) for x in (number, generates, trains))
    return [Steps(*parts) for parts in zip(*calls, strict=True)]


def initial_state(setting: Setting, params: Tree) -> State:
    """The initial state of one arm, without generated batches."""
    shape = (setting.ring, setting.groups, setting.group_size, setting.answer_tokens)
    waiting = Answers(jnp.zeros(shape, jnp.int32), jnp.zeros(shape))
    # a copy: the program donates both
    held = jax.tree.map(jnp.copy, params) if setting.holds_version else None
    return State(params, setting.optimizer.init(params), waiting, held)


def advance(
    setting: Setting, steps: Steps, constants: Constants, problems: Problems, state: State
) -> tuple[State, Sums]:
    """Takes one arm through the steps; the sums have a leading axis C, and are 0 in steps that do not train."""
    return jax.lax.scan(functools.partial(_advance_once, setting, constants, problems), state, steps)


def make_program(setting: Setting, arms: int) -> jax.stages.Wrapped:
    """Makes `advance` of `arms` arms, (steps, constants, problems, state) -> (state, sums); it donates the state."""
    blocks = -(-arms // MOST_SIDE_BY_SIDE)
    index = np.minimum(np.arange(blocks * -(-arms // blocks)), arms - 1)  # the last block is filled with the last arm

    def run(steps: Steps, constants: Constants, problems: Problems, state: State) -> tuple[State, Sums]:
        together = jax.vmap(functools.partial(advance, setting), in_axes=(None, 0, 0, 0))
        if blocks == 1:
            return together(steps, constants, problems, state)
        split = lambda x: jnp.asarray(x)[index].reshape(blocks, -1, *x.shape[1:])
        join = lambda x: x.reshape(-1, *x.shape[2:])[:arms]
        of_block = lambda block: together(steps, *block)
        return jax.tree.map(join, jax.lax.map(of_block, jax.tree.map(split, (constants, problems, state))))

    return jax.jit(run, donate_argnums=3)


def _advance_once(
    setting: Setting, constants: Constants, problems: Problems, state: State, now: Steps
) -> tuple[State, Sums]:
    def fill(state: State) -> State:
        if setting.holds_version:  # under fixed(k) every version generates
            takes = (constants.period == 0) | (now.number % jnp.maximum(constants.period, 1) == 0)
            take = lambda new, old: jnp.where(takes, new, old)
            state = state._replace(held=jax.tree.map(take, state.params, state.held))
        return state._replace(waiting=_generate(setting, constants, problems, state, now.number))

    def train(state: State) -> tuple[State, Sums]:
        return _train(setting, constants, problems, state, now.number)

    def rest(state: State) -> tuple[State, Sums]:
        _, sums = jax.eval_shape(train, state)
        return state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)

    # all arms share these conditions, so even under a vmap the branch that is not due is not computed
    state = jax.lax.cond(now.generates, fill, lambda state: state, state)
    return jax.lax.cond(now.trains, train, rest, state)


def _generate(setting: Setting, constants: Constants, problems: Problems, state: State, number: jax.Array) -> Answers:
    """Generates the batch that is due and adds it to the waiting ones; without a due batch they do not change."""
    before_first = number < 0
    batch = jnp.where(before_first, number + setting.longest_delay, number + constants.delay)
    due = batch < jnp.where(before_first, constants.delay, setting.updates)
    at = jnp.minimum(batch, setting.updates - 1)
    draws = at * setting.groups + jnp.arange(setting.groups)
    weights = state.held if setting.holds_version else state.params
    faults = take(problems.faults, at)
    scale = None if faults is None else faults.scale
    answers = generate(setting, constants, weights, jnp.asarray(problems.prompts)[at], draws, scale)
    place = batch % setting.ring
    put = lambda waiting, new: waiting.at[place].set(jnp.where(due, new, waiting[place]))
    return jax.tree.map(put, state.waiting, answers)


def _train(
    setting: Setting, constants: Constants, problems: Problems, state: State, number: jax.Array
) -> tuple[State, Sums]:
    answers = jax.tree.map(lambda waiting: waiting[number % setting.ring], state.waiting)
    prompts, truths = (jnp.asarray(side)[number] for side in (problems.prompts, problems.truths))
    batch = Batch(prompts, truths, answers, take(problems.faults, number))
    params, optimizer, sums = update(setting, constants, state.params, state.optimizer, batch, number)
    return State(params, optimizer, state.waiting, state.held), sums


UPDATES_PER_CALL = 20


@dataclasses.dataclass(frozen=True)
class ArmResult:
    """The result of one arm."""

    arm: Arm
    lines: Sequence[Line]  # the metrics of every update, as in metrics.jsonl
    params: Tree  # numpy, the weights after the last update

    @property
    def weights_sha256(self) -> str:
        """The hash of the weights, as in the report of a run."""
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
        """Compiles the program; else the first `advance` does."""
        program = make_program(self.setting, len(self.arms))
        self.compiled = program.lower(self.calls[0], *self.fixed, self.state).compile()

    def advance(self) -> list[list[Line]]:
        """Runs the next call of the program; returns, for each arm, the metrics of the updates made."""
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
        """The weights of one arm, as numpy arrays."""
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
      announce: called with the number of updates done, and with their total.

    Raises ConfigError, naming arm and field, for arms that one program cannot train, and if the directory of an arm
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
    """The initial weights and the problems of all arms, stacked; arms with one seed share its draws."""
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
    """Stacks the arrays of all arms, on the device."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


class Problems(NamedTuple):
    """Problems of one run, or of all arms with a leading axis. Group b of update u has the draw number u * B + b."""

    prompts: Array  # int32 [U, B, P]
    truths: Array  # int32 [U, B, A]
    faults: Faults | None = None  # frictions, if an arm of the program has some


def draw_problems(config: TrackedConfig, tokenizer: Tokenizer) -> Problems:
    """Draws all prompts of a run without dropped groups. Raises TaskError as the task does."""
    updates, groups = config.run.steps, config.learner.groups_per_update
    stream = build_task(config, tokenizer).prompts('train', config.run.seed)
    drawn = [stream.draw() for _ in range(updates * groups)]
    truths = [tokenizer.encode(prompt.problem['answer']) for prompt in drawn]
    shaped = lambda rows: np.stack(rows).astype(np.int32).reshape(updates, groups, -1)
    return Problems(shaped([prompt.tokens for prompt in drawn]), shaped(truths))
