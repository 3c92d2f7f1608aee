"""A sweep to try things with: eta 0 and 4 on token reversal, three seeds each, about a minute with two jobs.

    python -m areal_jax.main_sweep --config=configs/sweeps/tiny.py --workdir=runs/sweep_tiny --jobs=2

The clock is virtual, so every arm repeats bit for bit on one machine, and differences come from eta alone.
"""

from ml_collections import config_dict

from areal_jax import config as schema


def get_config() -> config_dict.ConfigDict:
    config = schema.default_config()
    config.run.steps = 40
    config.run.clock = 'virtual'
    config.run.export = False
    config.task.name = 'token_reversal'
    config.task.verifier = 'inline'
    config.rollout.slots = 16
    config.rollout.decode_steps = 2
    config.rollout.context_tokens = 16
    config.rollout.block_tokens = 16
    config.rollout.prefill_buckets = (32, 256)
    config.rollout.max_new_tokens = 8
    config.rollout.max_running_groups = 16  # stored results were made with so many
    config.learner.row_tokens = 128
    config.learner.row_loss_tokens = 96
    config.loss.entropy_coefficient = 0.03
    config.optimizer.learning_rate = 1e-3
    config.evaluation.problems = 4
    config.evaluation.samples = 16
    config.telemetry.tensorboard = False
    config.telemetry.plots = False
    return config


def get_sweep() -> dict[str, dict[str, float]]:
    return {f'eta{eta}_seed{seed}': {'staleness.eta': eta, 'run.seed': seed} for eta in (0, 4) for seed in range(3)}
