"""Tunix's side of generation.py: its own sampler on static batches, greedy or sampled.

Needs google-tunix 0.1.7 and numpy, and nothing of ours.

A batch runs until its longest answer is done; of the shorter ones only the tokens asked for count. Each batch has a
sampler whose cache holds the longest prompt and the longest answer and no more: Tunix reads all of it in every step.
"""

from __future__ import annotations

import importlib.metadata
import logging
import math
import os
from collections.abc import Mapping
from typing import Any

os.environ.setdefault('TQDM_DISABLE', '1')
os.environ.setdefault('HF_HUB_OFFLINE', '1')

import jax
import jax.numpy as jnp
import numpy as np
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params

from benchmarks.sides import Call, Start, serve
from benchmarks.workload import load_requests

PADDING, BEGIN, NEVER = 0, 1, -1  # token ids; no sampled token is NEVER, so nothing ends an answer


class TokenIds:
    """A tokenizer for prompts that are written as token ids."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Any, **_: Any) -> str:
        return ''  # the tokens are compared, not their text

    def bos_id(self) -> int:
        return BEGIN

    def eos_id(self) -> int:
        return NEVER

    def pad_id(self) -> int:
        return PADDING


def prepare(arguments: dict[str, Any]) -> Start:
    logging.disable(logging.WARNING)
    config = qwen3.ModelConfig(**arguments['tunix_model'])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ('fsdp', 'tp'))
    model = qwen3_params.create_model_from_safe_tensors(arguments['model'], config, mesh, jnp.float32)
    requests, rows = load_requests(arguments['requests']), arguments['slots']
    longest = max(map(len, requests.prompts))  # with the token that the sampler puts before each prompt
    sampled = {'temperature': arguments['temperature'], 'top_p': 1.0} if arguments['temperature'] else {}
    batches = []
    for first in range(0, len(requests.prompts), rows):
        batch = slice(first, first + rows)
        texts = [' '.join(map(str, prompt[1:])) for prompt in requests.prompts[batch]]
        batches.append((texts, requests.new_tokens[batch]))

    def start() -> tuple[Call, Any]:
        def make_sampler(new_tokens: int) -> Sampler:
            cache = CacheConfig(longest + new_tokens, config.num_layers, config.num_kv_heads, config.head_dim)
            return Sampler(model, TokenIds(), cache)

        samplers = [make_sampler(max(lengths)) for _, lengths in batches]

        def call() -> Mapping[str, float]:
            logprobs: list[float] = []
            for number, (sampler, (texts, lengths)) in enumerate(zip(samplers, batches, strict=True)):
                with mesh:
                    output = sampler(
                        texts, max(lengths), max_prompt_length=longest, return_logprobs=True, seed=number, **sampled
                    )
                for row, n in zip(output.logprobs, lengths, strict=True):
                    logprobs += row[:n]
            return {'tokens': float(len(logprobs)), 'mean_logprob': math.fsum(logprobs) / len(logprobs)}

        call()  # compiles
        return call, lambda: {'versions': versions()}

    return start


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ('google-tunix', 'jax', 'jaxlib', 'flax')}


if __name__ == '__main__':
    serve(prepare)
