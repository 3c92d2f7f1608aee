"""Tunix's side of whole_system.py: its GRPOLearner with its own sampler and trainer, on one CPU device.

Needs google-tunix 0.1.7, jax 0.10.2, tokenizers and psutil, and nothing of ours. Prints a line of JSON when the learner
asks for the next batch. Prompts and answers are passed as the numbers of their tokens, separated by spaces.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from flax import nnx
from tunix.models.llama3 import model as llama3
from tunix.models.llama3 import params as llama3_params
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout import base_rollout


class TokenNumbers:
    """A tokenizer of texts that are the numbers of tokens."""

    def __init__(self, begin: int, end: int, padding: int):
        self._begin, self._end, self._padding = begin, end, padding
        self.bos_token, self.eos_token, self.pad_token = map(str, (begin, end, padding))

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Any, **_: Any) -> str:
        return ' '.join(str(int(token)) for token in ids)

    def bos_id(self) -> int:
        return self._begin

    def eos_id(self) -> int:
        return self._end

    def pad_id(self) -> int:
        return self._padding


def train(arguments: dict[str, Any]) -> None:
    job = pathlib.Path(arguments['job'])
    described = json.loads((job / 'model' / 'config.json').read_text())
    told = json.loads((job / 'job.json').read_text())
    problems, end = told['problems'], told['end']
    words = tokenizers.Tokenizer.from_file(str(job / 'model' / 'tokenizer.json'))
    limit = arguments['new_tokens']
    truths = {' '.join(map(str, problem['tokens'][1:])): problem['answer'] for problem in problems}
    longest = max(len(problem['tokens']) for problem in problems)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ('fsdp', 'tp'))
    model = llama3_params.create_model_from_safe_tensors(str(job / 'model'), model_config(described), mesh, jnp.float32)
    tokens: list[int] = []  # of the answers since the last update

    def reward(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
        ids = [list(map(int, completion.split())) for completion in completions]
        tokens.append(sum(map(len, ids)))
        return [
            score(words.decode(answer), truths[str(prompt)], len(answer) < limit or answer[-1] == end)
            for prompt, answer in zip(prompts, ids, strict=True)
        ]

    def batches() -> Iterator[dict[str, np.ndarray]]:
        for update in range(arguments['updates']):
            if update:
                jax.block_until_ready(jax.tree.leaves(nnx.state(cluster.actor_trainer.model)))
                print('\n' + json.dumps({'update': update, 'tokens': sum(tokens)}), flush=True)
                tokens.clear()
            chosen = [problems[(update * arguments['groups'] + i) % len(problems)] for i in range(arguments['groups'])]
            # the sampler puts the token that begins a text before each prompt
            yield {'prompts': np.array([' '.join(map(str, problem['tokens'][1:])) for problem in chosen])}

    per_pass = max(1, arguments['microbatch'] // arguments['group_size'])
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-5, b1=0.9, b2=0.95, weight_decay=0.0))
    role = rl_cluster.Role
    cluster = rl_cluster.RLCluster(
        actor=model,
        reference=None,
        tokenizer=TokenNumbers(problems[0]['tokens'][0], end, 0),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={role.ACTOR: mesh, role.REFERENCE: mesh, role.ROLLOUT: mesh},
            rollout_engine='vanilla',
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optimizer,
                eval_every_n_steps=10**9,
                max_steps=arguments['updates'],
                mini_batch_size=arguments['groups'],
                train_micro_batch_size=per_pass,
                rollout_micro_batch_size=arguments['groups'],
                compute_logps_micro_batch_size=arguments['groups'],
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=limit, max_prompt_length=longest, temperature=1.0, top_p=1.0, top_k=None,
                kv_cache_size=longest + limit, eos_tokens=[end],
            ),
        ),
    )  # fmt: skip
    config = GRPOConfig(num_generations=arguments['group_size'], num_iterations=1, beta=0.0, epsilon=0.2)
    learner = GRPOLearner(rl_cluster=cluster, algo_config=config, reward_fns=reward)
    learner.train(_Batches(batches))


class _Batches:
    """What GRPOLearner iterates over."""

    def __init__(self, make: Any):
        self._make = make

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self._make()


def model_config(described: dict[str, Any]) -> llama3.ModelConfig:
    return llama3.ModelConfig(
        num_layers=described['num_hidden_layers'], vocab_size=described['vocab_size'],
        embed_dim=described['hidden_size'], hidden_dim=described['intermediate_size'],
        num_heads=described['num_attention_heads'], head_dim=described['head_dim'],
        num_kv_heads=described['num_key_value_heads'], rope_theta=int(described['rope_theta']),
        norm_eps=described['rms_norm_eps'], weight_tying=described['tie_word_embeddings'],
    )  # fmt: skip


def score(text: str, truth: str, ended: bool) -> float:
    """1 if the answer ended by itself and its last integer is right."""
    numbers = re.findall(r'-?\d+', text)
    return float(ended and bool(numbers) and numbers[-1] == truth)


if __name__ == '__main__':
    train(json.loads(sys.argv[1]))
