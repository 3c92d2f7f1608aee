"""The other side of against_torch.py: transformers' generate and a plain padded PPO step in torch, float32."""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM

from benchmarks import workload

MICROBATCH_ROWS = 16


def timed(work) -> dict[str, float]:
    wall, cpu = time.monotonic(), time.process_time()
    work()
    return {'wall_s': time.monotonic() - wall, 'cpu_s': time.process_time() - cpu}


def padded_rows(lengths: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches (tokens, loss mask), sorted by length and padded to the longest of their rows."""
    rows = []
    for prompt, group in zip(workload.prompts(0, workload.GROUPS), workload.answers(0, lengths), strict=True):
        rows += [(torch.tensor([*prompt, *answer]).long(), len(answer)) for answer in group]
    rows.sort(key=lambda row: len(row[0]))
    batches = []
    for start in range(0, len(rows), MICROBATCH_ROWS):
        part = rows[start : start + MICROBATCH_ROWS]
        tokens = torch.nn.utils.rnn.pad_sequence([r for r, _ in part], batch_first=True)
        mask = torch.zeros(tokens.shape, dtype=torch.bool)
        for i, (row, answer) in enumerate(part):
            mask[i, len(row) - answer : len(row)] = True
        batches.append((tokens, mask))
    return batches


def train_step(model, optimizer, batches) -> None:
    total = sum(int(mask.sum()) for _, mask in batches)
    for tokens, mask in batches:
        attention = torch.ones_like(tokens)  # padding is at the end and out of the loss: causal order hides it
        logits = model(input_ids=tokens, attention_mask=attention).logits[:, :-1]
        answer = mask[:, 1:]
        logprobs = torch.log_softmax(logits[answer].float(), -1)
        policy = logprobs.gather(-1, tokens[:, 1:][answer][:, None])[:, 0]
        ratio = torch.exp(policy - policy.detach())
        advantage = torch.ones_like(ratio)
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / total
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def main() -> None:
    repetitions, directory = int(sys.argv[1]), sys.argv[2]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rows = torch.tensor(workload.prompts(0, workload.SLOTS)).long()
    attention = torch.ones_like(rows)

    def generate() -> None:
        with torch.no_grad():
            model.generate(
                rows, attention_mask=attention, do_sample=True, min_new_tokens=workload.NEW_TOKENS,
                max_new_tokens=workload.NEW_TOKENS, pad_token_id=2,
            )  # fmt: skip

    generate()
    results = {'generate': [timed(generate) for _ in range(repetitions)]}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for lengths in ('equal', 'lognormal'):
        batches = padded_rows(lengths)
        train_step(model, optimizer, batches)
        results[f'train {lengths}'] = [timed(lambda: train_step(model, optimizer, batches)) for _ in range(repetitions)]
    results['threads'] = torch.get_num_threads()
    results['versions'] = {'torch': torch.__version__, 'transformers': __import__('transformers').__version__}
    print(json.dumps(results))


if __name__ == '__main__':
    main()
