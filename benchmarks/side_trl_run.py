"""TRL's side of whole_system.py: its GRPOTrainer on a CPU, with transformers' generate.

Needs trl 1.16.0, torch 2.13.0 (CPU), transformers 5.23.0, datasets and psutil, and nothing of ours. Prints a line of
JSON when an optimizer step is done. The answers of an update are generated as one batch and trained in micro-batches.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def train(arguments: dict[str, Any]) -> None:
    torch.set_num_threads(arguments['threads'])
    job = pathlib.Path(arguments['job'])
    model = AutoModelForCausalLM.from_pretrained(job / 'model', dtype=torch.float32, attn_implementation='sdpa')
    problems = json.loads((job / 'job.json').read_text())['problems']
    data = Dataset.from_list([{key: problem[key] for key in ('prompt', 'answer')} for problem in problems])
    answers = arguments['groups'] * arguments['group_size']
    tokens: list[int] = []  # of the answers since the last step

    def reward(completions: Any, answer: Any, completion_ids: Any, **_: Any) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return [
            score(completion[-1]['content'], truth, len(ids) < arguments['new_tokens'])
            for completion, truth, ids in zip(completions, answer, completion_ids, strict=True)
        ]

    class Report(TrainerCallback):
        def on_step_end(self, _arguments: Any, state: Any, _control: Any, **_: Any) -> None:
            print(json.dumps({'update': state.global_step, 'tokens': sum(tokens)}), flush=True)
            tokens.clear()

    config = GRPOConfig(
        output_dir=str(job / 'trl'), use_cpu=True, seed=arguments['seed'], max_steps=arguments['updates'],
        per_device_train_batch_size=arguments['microbatch'],
        gradient_accumulation_steps=answers // arguments['microbatch'],
        num_generations=arguments['group_size'], max_completion_length=arguments['new_tokens'],
        temperature=1.0, top_k=0, top_p=1.0, beta=0.0, num_iterations=1, epsilon=0.2, loss_type='dapo',
        scale_rewards='group', learning_rate=2e-5, adam_beta1=0.9, adam_beta2=0.95, weight_decay=0.0,
        max_grad_norm=1.0, lr_scheduler_type='constant', warmup_steps=0, bf16=False, gradient_checkpointing=False,
        save_strategy='no', report_to=[], logging_steps=10**6, disable_tqdm=True, dataloader_num_workers=0,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(job / 'model')
    GRPOTrainer(
        model=model, args=config, train_dataset=data, reward_funcs=reward, processing_class=tokenizer,
        callbacks=[Report()],
    ).train()  # fmt: skip


def score(text: str, truth: str, ended: bool) -> float:
    """1 if the answer ended by itself and its last integer is right."""
    numbers = re.findall(r'-?\d+', text)
    return float(ended and bool(numbers) and numbers[-1] == truth)


if __name__ == '__main__':
    train(json.loads(sys.argv[1]))
