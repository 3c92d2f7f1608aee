"""Tunix's side of against_tunix.py: its RL trainer with its GRPO loss, as its learner sets the trainer up.

No rollout engine and no reward functions are built, and padded arrays are made beforehand: what is measured begins
where the learner has its examples. Tunix's sequence packing (max_seq_token_per_tpu of its training config) is off: a
packed row carries segment ids in place of a mask, and only its TPU attention kernel reads them. On any other device
tokens would see later ones and other answers, so that losses and gradients could not be compared. Needs google-tunix
0.1.7, numpy and nothing of ours.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import Mapping
from typing import Any

os.environ.setdefault('TQDM_DISABLE', '1')  # a progress bar on a terminal nobody sees
os.environ.setdefault('HF_HUB_OFFLINE', '1')

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params
from tunix.rl import algo_core, rl_cluster, trainer
from tunix.rl.grpo.grpo_learner import GRPOConfig, TrainExample
from tunix.sft.metrics_logger import Mode

from benchmarks.sides import Call, Compilations, Start, serve
from benchmarks.workload import Work, load_work

PAD, NEVER = 0, -1  # token ids: padding, which is compared with, and the end of a text, which is not


def prepare(arguments: dict[str, Any]) -> Start:
    """An update with learning rate 0, so that every call computes the same."""
    logging.disable(logging.WARNING)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ('fsdp', 'tp'))
    config = qwen3.ModelConfig(**arguments['tunix_model'])
    model = qwen3_params.create_model_from_safe_tensors(arguments['model'], config, mesh, jnp.float32)
    work = load_work(arguments['work'])
    microbatches = np.split(np.arange(len(work.answers)), arguments['microbatches'])
    padded = [pad_rows(work, rows) for rows in microbatches]

    def start() -> tuple[Call, Any]:
        compilations = Compilations()
        with mesh:
            learner = make_trainer(model, work.group_size, len(work.prompts), len(padded))

        def call() -> Mapping[str, float]:
            examples = [
                TrainExample(
                    **{k: jnp.asarray(v) for k, v in rows.items()}, ref_per_token_logps=None, old_per_token_logps=None
                )
                for rows in padded
            ]
            with mesh:
                learner.train(examples, None)
            jax.block_until_ready((learner.optimizer.opt_state, jax.tree.leaves(learner.model)))
            return logged_checks(learner)

        def facts() -> Mapping[str, Any]:
            return {'compilations': compilations.report(), 'versions': versions()}

        return call, facts

    return start


def pad_rows(work: Work, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Answers padded on the right to the longest that may be generated, as the learner does it."""
    completions = np.full((len(rows), work.limit_tokens), PAD, np.int32)
    for row, i in enumerate(rows):
        completions[row, : len(work.answers[i])] = work.answers[i]
    prompts = np.stack([work.prompt_of(i) for i in rows])
    return {
        'prompt_ids': prompts,
        'prompt_mask': prompts != PAD,
        'completion_ids': completions,
        'completion_mask': completions != PAD,
        'advantages': work.advantages[rows],
    }


def make_trainer(model: Any, group_size: int, groups: int, microbatches: int) -> trainer.Trainer:
    """With one optimizer step for all groups, and what GRPOLearner gives its trainer."""
    algorithm = GRPOConfig(
        num_generations=group_size, num_iterations=1, beta=0.0, epsilon=0.2, loss_agg_mode='token-mean'
    )
    algorithm.temperature = 1.0
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.0, b1=0.9, b2=0.95, weight_decay=0.0))
    learner = trainer.Trainer(
        model=model,
        optimizer=optimizer,
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optimizer,
            eval_every_n_steps=10**9,
            mini_batch_size=groups,
            train_micro_batch_size=groups // microbatches,
        ),
        custom_checkpoint_metadata_fn=dict,
    )
    learner.is_managed_externally = True
    learner.with_loss_fn(
        lambda model, train_example, algo_config: algo_core.grpo_loss_fn(
            model, train_example, algo_config=algo_config, pad_id=PAD, eos_id=NEVER
        ),
        has_aux=True,
    )
    learner.with_gen_model_input_fn(lambda example: {'train_example': example, 'algo_config': algorithm})
    learner.with_rl_metrics_to_log({'kl': np.mean, 'pg_clipfrac': np.mean})
    return learner


def logged_checks(learner: trainer.Trainer) -> dict[str, float]:
    """Of the call before, or nothing after the first: Tunix logs a step when the next has been dispatched."""
    place = (learner.metrics_prefix, 'grad_norm', Mode.TRAIN)
    if not learner.metrics_logger.metric_exists(*place):
        return {}
    return {'update/grad_norm': float(learner.metrics_logger.get_metric_history(*place)[-1])}


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ('google-tunix', 'jax', 'jaxlib', 'flax', 'optax')}


if __name__ == '__main__':
    serve(prepare)
