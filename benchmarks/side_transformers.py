"""transformers' side of generation.py: `generate` on static batches, float32.

Needs torch, transformers and numpy, and nothing of ours.

A batch runs until its longest answer is done; of the shorter ones only the tokens asked for count. Prompts are padded
on the left.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

os.environ.setdefault('HF_HUB_OFFLINE', '1')

import torch
import transformers

from benchmarks.sides import Call, Start, serve
from benchmarks.workload import Requests, load_requests

WARM_UP_TOKENS = 4  # of one batch, before the first call
PADDING = 2  # any token: padding is masked


class SampledLogprobs(transformers.LogitsProcessor):
    """Log-probs of the sampled tokens from the logits of each step; cheaper than keeping all logits to the end."""

    def __init__(self) -> None:
        self._last: torch.Tensor | None = None  # logits of the step whose token is not known yet, [B, V]
        self._steps: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._last is not None:
            self._take(input_ids[:, -1])
        self._last = scores
        return scores

    def finish(self, output: torch.Tensor) -> torch.Tensor:
        """[B, new tokens]."""
        self._take(output[:, -1])
        return torch.stack(self._steps, dim=1)

    def _take(self, tokens: torch.Tensor) -> None:
        assert self._last is not None
        self._steps.append(self._last.gather(1, tokens[:, None])[:, 0] - self._last.logsumexp(dim=-1))


def prepare(arguments: dict[str, Any]) -> Start:
    if 'threads' in arguments:
        torch.set_num_threads(arguments['threads'])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        arguments['model'], dtype=torch.float32, attn_implementation=arguments['attention']
    )
    model.generation_config.eos_token_id = None  # no token ends an answer
    requests, rows = load_requests(arguments['requests']), arguments['slots']
    cache = {'cache_implementation': arguments['cache']} if arguments['cache'] != 'dynamic' else {}

    def generate(requests: Requests) -> Mapping[str, float]:
        tokens, logprob_sum = 0, 0.0
        for first in range(0, len(requests.prompts), rows):
            batch = slice(first, first + rows)
            logprobs = generate_batch(model, requests.prompts[batch], max(requests.new_tokens[batch]), cache)
            for row, n in zip(logprobs, requests.new_tokens[batch], strict=True):
                tokens += n
                logprob_sum += float(row[:n].sum())
        return {'tokens': float(tokens), 'mean_logprob': logprob_sum / tokens}

    def start() -> tuple[Call, Any]:
        generate(requests.head(rows, WARM_UP_TOKENS))
        return lambda: generate(requests), facts

    return start


def generate_batch(model: Any, prompts: Any, new_tokens: int, cache: Mapping[str, str]) -> torch.Tensor:
    """Log-probs [B, new_tokens] of sampled answers."""
    longest = max(map(len, prompts))
    rows = torch.full((len(prompts), longest), PADDING)
    mask = torch.zeros_like(rows)
    for row, seen, prompt in zip(rows, mask, prompts, strict=True):
        row[longest - len(prompt) :] = torch.tensor(prompt)
        seen[longest - len(prompt) :] = 1
    sampled = SampledLogprobs()
    with torch.inference_mode():
        output = model.generate(
            rows, attention_mask=mask, do_sample=True, temperature=1.0, top_p=1.0, max_new_tokens=new_tokens,
            top_k=0,  # off, as on our side: transformers cuts to the 50 likeliest tokens by default
            pad_token_id=PADDING, logits_processor=transformers.LogitsProcessorList([sampled]), **cache,
        )  # fmt: skip
        return sampled.finish(output)


def facts() -> dict[str, Any]:
    return {
        'threads': torch.get_num_threads(),
        'versions': {'torch': torch.__version__, 'transformers': transformers.__version__},
    }


if __name__ == '__main__':
    serve(prepare)
