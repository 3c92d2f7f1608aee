"""Builds the task of a run: its problems or demonstrations, and the verifier of its answers.

Used by session.py and sft.py; tasks/ has the implementations.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import numpy as np

from areal_jax.config import TrackedConfig
from areal_jax.control.clocks.loop import LoopClock
from areal_jax.tasks.answers import mathematics
from areal_jax.tasks.audit import Audit
from areal_jax.tasks.demonstrations import Demonstrations, read_demonstrations, solve_task
from areal_jax.tasks.registry import make_task, value_names
from areal_jax.tasks.task import Task
from areal_jax.tasks.tokenizer import Tokenizer
from areal_jax.tasks.verifier import InlineVerifier, ProcessVerifier


def build_task(config: TrackedConfig, tokenizer: Tokenizer) -> Task:
    """The task; problems whose prompts exceed the engines' context are dropped or refused (task.over_length)."""
    name = config.task.name
    task = make_task(name, tokenizer, **{field: getattr(config.task, field) for field in value_names(name)})
    room = config.rollout.context_tokens - config.rollout.max_new_tokens
    task = task.fitting(room, config.task.over_length)
    sizes = task.sizes()
    if sizes['dropped']:
        print(
            f'dropped {sizes["dropped"]} of {sum(sizes.values())} problems: their prompts have more than {room} tokens',
            flush=True,
        )
    if 0 < sizes['held_out'] < (wanted := config.evaluation.problems):
        print(f'evaluation.problems={wanted}: all {sizes["held_out"]} held-out problems are evaluated', flush=True)
    return task


def build_demonstrations(config: TrackedConfig, tokenizer: Tokenizer) -> Demonstrations:
    """Demonstrations from the file task.path if task.name='jsonl', else another task's problems with their answers."""
    name = config.task.name
    if name == 'jsonl':
        task = config.task
        found = read_demonstrations(task.path, tokenizer, task.system_prompt, task.held_out_fraction)
    else:
        values = {field: getattr(config.task, field) for field in value_names(name)}
        found = solve_task(make_task(name, tokenizer, **values), tokenizer)
    return found.fitting(config.learner.row_tokens, config.learner.row_loss_tokens, config.task.over_length)


def build_verifier(
    config: TrackedConfig,
    clock: LoopClock,
    task: Task,
    decode: Callable[[np.ndarray], str],
    workdir: pathlib.Path | None = None,
) -> ProcessVerifier | InlineVerifier:
    """The verifier of the task's answers; one that compares some of them twice writes to WORKDIR/audit.jsonl."""
    if config.task.verifier == 'inline':
        return InlineVerifier(task.score, decode)
    return ProcessVerifier(
        clock,
        task.scorer,
        decode,
        workers=config.task.verifier_workers,
        deadline_s=config.task.verifier_deadline_s,
        attempts=config.task.verifier_attempts,
        memory_mb=config.task.verifier_memory_mb,
        audit=_build_audit(config, workdir),
    )


def _build_audit(config: TrackedConfig, workdir: pathlib.Path | None) -> Audit | None:
    if config.task.name != 'jsonl' or config.task.answer != 'math':
        return None
    if not config.task.audit_fraction or workdir is None:
        return None
    return Audit(workdir, config.task.audit_fraction, mathematics.compare_texts)
