"""The process that scores the final weights of single runs: python -m areal_jax.studies.score_runs LIST.

LIST is the file that stages.py writes. Each run without a score.json gets one.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax import files
from areal_jax.app.model.model import EarlierRun, describe_model
from areal_jax.app.parts.compilations import use_compilation_cache
from areal_jax.app.parts.task_builder import build_task
from areal_jax.app.process.ending import ProcessEnd, end_command
from areal_jax.app.process.setup import silence_libraries
from areal_jax.config import TrackedConfig, default_config
from areal_jax.errors import ExitCode
from areal_jax.studies.arms.answer_generation import generate
from areal_jax.studies.arms.arm import Arm
from areal_jax.studies.arms.setting import make_constants, make_setting
from areal_jax.studies.stages import SCORE, read_list
from areal_jax.types import Tree

SEED = 2**31 - 1  # of the noise
MOST_PROMPTS = 64  # of a task with more prompts, the first ones in a fixed order
ANSWERS = 64  # to each prompt


def make_scorer(arm: Arm) -> Callable[[Tree], float]:
    """Returns a function from weights of the arm's model to their score.

    The score is the share of an answer's task.length places that are right. Unless rollout.ignore_eos is set, the end
    is one more place, and every place after an end is wrong.
    """
    config = arm.config.copy_and_resolve_references().unlock()
    ends = not config.rollout.ignore_eos
    config.run.seed = SEED
    config.rollout.temperature = 1.0
    config.rollout.max_new_tokens = config.task.length + ends
    config.friction = default_config().friction  # a score has none
    config.loss.advantage = default_config().loss.advantage  # a score has none, and the arm's may be the user's own
    config.staleness.schedule, config.staleness.eta = 'fixed(0)', default_config().staleness.eta
    prompts, truths = _problems(TrackedConfig(config), ends)
    eos = describe_model(TrackedConfig(config)).tokenizer.eos_id if ends else None
    asked = [Arm(arm.name, config)]
    setting = make_setting(asked)
    constants = jax.tree.map(lambda x: x[0], make_constants(asked))
    repeats = -(-ANSWERS // setting.group_size)
    tiled, draws = np.repeat(prompts, repeats, axis=0), np.arange(len(prompts) * repeats)

    @jax.jit
    def answer(params: Tree) -> jax.Array:
        return generate(setting, constants, params, jnp.asarray(tiled), jnp.asarray(draws)).tokens  # [S * R / G, G, A]

    return lambda params: share_right(np.asarray(answer(params)), np.repeat(truths, repeats, axis=0), eos)


def share_right(answers: np.ndarray, truths: np.ndarray, eos: int | None) -> float:
    """The share of places in answers [N, G, A] equal to truths [N, A]; if `eos` is given, none after it counts."""
    right = answers == truths[:, None]
    if eos is not None:
        is_end = answers == eos
        right &= np.cumsum(is_end, axis=-1) == is_end  # no end before this place
    return float(np.mean(right))


def _problems(config: TrackedConfig, ends: bool) -> tuple[np.ndarray, np.ndarray]:
    """int32 prompts [S, P] and truths [S, A]."""
    tokenizer = describe_model(config).tokenizer
    task = build_task(config, tokenizer)
    stream = task.prompts('train', 0)
    drawn = [stream.draw() for _ in range(min(task.sizes()['train'], MOST_PROMPTS))]
    end = [tokenizer.eos_id] if ends else []
    truths: Sequence[np.ndarray] = [np.append(tokenizer.encode(prompt.problem['answer']), end) for prompt in drawn]
    return np.stack([prompt.tokens for prompt in drawn]), np.stack(truths).astype(np.int32)


def score_runs(path: pathlib.Path) -> int:
    """Scores the newest checkpoint of each run of the list; returns the exit code."""
    listed = {name: entry for name, entry in read_list(path).items() if not (entry[0] / SCORE).exists()}
    scorers: dict[str, Callable[[Tree], float]] = {}
    for name, (workdir, config) in listed.items():
        key = repr([sorted(config[section].items()) for section in ('model', 'task', 'rollout')])
        with use_compilation_cache(TrackedConfig(config)):
            score = scorers.setdefault(key, make_scorer(Arm(name, config)))
            files.write_json(workdir / SCORE, {'score': score(read_weights(workdir))})
    return ExitCode.FINISHED


def read_weights(workdir: pathlib.Path) -> Tree:
    """Reads the weights of the newest checkpoint of a run, as numpy arrays."""
    run = EarlierRun(str(workdir))
    decoder = describe_model(run.config).decoder
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(np.asarray, run.read_weights(decoder, lambda tree: jax.tree.map(lambda _: device, tree)))


if __name__ == '__main__':
    silence_libraries()
    end = ProcessEnd()
    sys.exit(end.note(end_command(lambda: score_runs(pathlib.Path(sys.argv[1])), doing='writing scores')))
