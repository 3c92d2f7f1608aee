"""The prompts of every update of a run and their answers, from the stream of its task."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from areal_jax.app.parts.task_builder import build_task
from areal_jax.config import TrackedConfig
from areal_jax.rollout.decode.decode_rows import Array
from areal_jax.studies.arms.answer_generation import Faults
from areal_jax.text.tokenizer import Tokenizer


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
