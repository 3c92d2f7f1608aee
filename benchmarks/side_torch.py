"""The other side of against_torch.py: a plain padded GRPO step and transformers' generate in torch, float32.

Needs torch, transformers and numpy, and nothing of ours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.sides import Call, Start, serve
from benchmarks.workload import Work, load_work

CLIP_EPSILON = 0.2


def prepare(arguments: dict[str, Any]) -> Start:
    """`core`: the one that it runs on, with one thread; `experts`: how transformers multiplies them."""
    if 'core' in arguments:
        os.sched_setaffinity(0, {arguments['core']})
        torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments['model'], dtype=torch.float32)
    if 'experts' in arguments:
        model.config._experts_implementation = arguments['experts']
    work = load_work(arguments['work'])
    kind = {'train': start_training, 'generate': start_generation}[arguments['task']]
    facts = {
        'threads': torch.get_num_threads(),
        'versions': {'torch': torch.__version__, 'transformers': transformers.__version__},
    }
    return lambda: (kind(model, work, arguments), lambda: facts)


def start_training(model: Any, work: Work, arguments: Mapping[str, Any]) -> Call:
    """An update with learning rate 0, so that every call computes the same."""
    batches = pad_rows(work, arguments['rows_per_microbatch'], arguments['order'])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    return lambda: train_step(model, optimizer, batches)


def pad_rows(work: Work, rows: int, order: str) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Micro-batches (tokens [R, T], mask of answers [R, T], advantages [R]), padded to the longest of their rows."""
    lengths = np.array([len(a) for a in work.answers])
    indices = np.argsort(lengths, kind='stable') if order == 'by length' else np.arange(len(lengths))
    batches = []
    for part in np.split(indices, range(rows, len(indices), rows)):
        texts = [torch.tensor([*work.prompt_of(i), *work.answers[i]]).long() for i in part]
        tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        mask = torch.zeros(tokens.shape, dtype=torch.bool)
        for row, text, i in zip(mask, texts, part, strict=True):
            row[len(text) - lengths[i] : len(text)] = True
        batches.append((tokens, mask, torch.tensor(work.advantages[part])))
    return batches


def train_step(model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Any]) -> Mapping[str, float]:
    total = sum(int(mask.sum()) for _, mask, _ in batches)
    loss_sum = 0.0
    for tokens, mask, advantages in batches:
        attention = torch.ones_like(tokens)  # padding is at the end and out of the loss: causal order hides it
        logits = model(input_ids=tokens, attention_mask=attention).logits[:, :-1]
        answer = mask[:, 1:]
        logprobs = torch.log_softmax(logits[answer].float(), -1)
        policy = logprobs.gather(-1, tokens[:, 1:][answer][:, None])[:, 0]
        ratio = torch.exp(policy - policy.detach())
        advantage = advantages[:, None].expand(answer.shape)[answer]
        clipped = ratio.clamp(1 - CLIP_EPSILON, 1 + CLIP_EPSILON)
        loss = -torch.minimum(ratio * advantage, clipped * advantage).sum() / total
        loss.backward()
        loss_sum += float(loss.detach())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return {'loss/value': loss_sum, 'update/grad_norm': float(norm)}


def start_generation(model: Any, work: Work, arguments: Mapping[str, Any]) -> Call:
    rows = torch.tensor(work.prompts).long()
    new_tokens = arguments['new_tokens']

    def call() -> Mapping[str, float]:
        with torch.no_grad():
            out = model.generate(
                rows, attention_mask=torch.ones_like(rows), do_sample=True, min_new_tokens=new_tokens,
                max_new_tokens=new_tokens, pad_token_id=2,
                top_k=0,  # off, as on our side: transformers cuts to the 50 likeliest tokens by default
            )  # fmt: skip
        return {'tokens': float(out.numel() - rows.numel())}

    return call


if __name__ == '__main__':
    serve(prepare)
