"""The study of staleness: what old data does to plain PPO, to decoupled PPO and to weighted policy gradient.

    python -m areal_jax.main_sweep --config=configs/sweeps/staleness.py --workdir=runs/staleness [--quick]

docs/study.md says what is compared and why. Everything that decides what counts as a result is in this file: it was
written, and is kept, before the results.
"""

import dataclasses

from ml_collections import config_dict

from areal_jax import config as schema
from areal_jax.studies.plan import Bounds, Controls, LockStep, Margins, Natural, Plan

INFINITE = float('inf')
SYMBOLS = 4  # of a prompt, and of an answer

LOCK_STEP = LockStep(
    common={
        'rollout.ignore_eos': True, 'rollout.max_new_tokens': SYMBOLS, 'rollout.decode_steps': SYMBOLS,
        'run.steps': 300, 'learner.row_tokens': 256, 'learner.row_loss_tokens': 256,
    },
    methods={
        # the paper's four minibatches; with one, 'decoupled' would not clip and equal 'weighted_pg'
        'plain': {'loss.proximal': 'behavior', 'learner.n_minibatches': 4},
        'decoupled': {'loss.proximal': 'recompute', 'learner.n_minibatches': 4},
        # every ratio is at least 0, so a lower bound of 1 - 1 never clips
        'weighted_pg': {
            'loss.proximal': 'recompute', 'learner.n_minibatches': 1, 'loss.clip_epsilon': 1.0,
            'loss.clip_epsilon_high': 1e9,
        },
    },
    # at lag 0 'plain' and 'decoupled' are one algorithm
    rate_from={'plain': 'decoupled', 'decoupled': 'decoupled', 'weighted_pg': 'weighted_pg'},
    lags=(0, 1, 2, 4, 8, 16, 32, 64),
    rates=(3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    knee_slack=0.02,
    knee_seeds=(200, 201, 202),
    seeds=(0, 1, 2, 3, 4),
    side_factors=(1 / 3, 3.0),
    side_seeds=(0, 1),
    pilot_seeds=(100, 101, 102, 103, 104, 105, 106, 107),
    pilot_lag=8,
)  # fmt: skip

NATURAL = Natural(
    # Prices: generation of a batch takes about 0.15 s and its update 0.28 s, so engines run ahead until eta, or at
    # eta=inf the room for 512 groups (64 batches), holds them back. No group is left out of an update: what it costs
    # does not fall while the model learns.
    common={
        'run.steps': 300, 'virtual.decode_step_s': 0.004, 'virtual.prefill_token_s': 0.00005,
        'virtual.train_token_s': 0.0005, 'virtual.publish_s': 0.02, 'virtual.reward_s': 0.001,
        'buffer.capacity': 512, 'rollout.max_running_groups': 16, 'diagnostics.ratio_sample': 0.02,
        'learner.filter_equal_rewards': False,
    },
    methods=('plain', 'decoupled'),
    etas=(0.0, 1.0, 4.0, 16.0, INFINITE),
    seeds=(0, 1, 2),
    variants={
        'wait': {'rollout.kv_policy': 'wait'},  # not interruptible
        'keep': {'rollout.kv_policy': 'keep'},
    },
    variant_eta=4.0,
    variant_method='decoupled',
    jobs=2,
)  # fmt: skip

CONTROLS = Controls(
    # A plain decoder of three layers that answers with the two symbols, ten prompts of ten symbols, ten answers each,
    # Adam as its library has it: a lag of 30 is known to keep unclipped weighted policy gradient at chance, and a lag
    # of 0 to solve the task. The median of the seeds is judged: docs/design/arms.md shows how far single ones lie, and
    # why tokens and positions start three times as large as a library would draw them.
    known={
        'run.steps': 300, 'task.length': 10, 'rollout.max_new_tokens': 10, 'rollout.decode_steps': 10,
        'rollout.context_tokens': 32, 'rollout.block_tokens': 32, 'rollout.group_size': 10,
        'learner.groups_per_update': 10, 'model.n_layers': 3, 'model.n_kv_heads': 4, 'model.family': 'plain',
        'model.outputs': 'symbols', 'model.embedding_scale': 3.0, 'loss.advantage': 'group_mean',
        'loss.entropy_coefficient': 0.0, 'optimizer.learning_rate': 3e-4, 'optimizer.clip_norm': 0.0,
        'optimizer.b2': 0.999, 'learner.filter_equal_rewards': False,
    },
    known_method='weighted_pg',
    known_seeds=tuple(range(500, 516)),
    known_bounds={0: Bounds(0.97, 1.0), 30: Bounds(0.45, 0.55)},
    known_window=(250, 300),
    same_lag=4,
    same_eta=4.0,
    shuffled={'loss.advantage': 'areal_jax.studies.controls:shuffled_advantages'},
    shuffled_below=0.55,  # chance among the two symbols is 0.5
)  # fmt: skip

# 0.05 is a tenth of the way from chance among the two symbols to every symbol right; the paper calls its own
# differences of 1 to 2 points of 42 equal.
MARGINS = Margins(score=0.05, confidence=0.95, power=0.8, slow=0.8, flat=0.1, flat_from=4.0)

FULL = Plan(LOCK_STEP, NATURAL, CONTROLS, MARGINS, jobs=2)

# Every part once, to see that the command works on a machine; it settles no question.
QUICK = Plan(
    dataclasses.replace(
        LOCK_STEP, common={**LOCK_STEP.common, 'run.steps': 100}, lags=(0, 4, 16), rates=(1e-3, 3e-3, 1e-2),
        knee_seeds=(200,), seeds=(0, 1), side_seeds=(0,), pilot_seeds=(100, 101, 102),
    ),
    dataclasses.replace(
        NATURAL, common={**NATURAL.common, 'run.steps': 40}, etas=(0.0, 4.0, INFINITE), seeds=(0,),
    ),
    dataclasses.replace(CONTROLS, known_seeds=(500,)),
    MARGINS,
    jobs=2,
)  # fmt: skip


def get_config() -> config_dict.ConfigDict:
    config = schema.default_config()
    config.run.clock = 'virtual'
    config.run.export = False
    config.task.name = 'token_reversal'
    config.task.length = SYMBOLS
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
    config.evaluation.problems = 0
    config.telemetry.tensorboard = False
    config.telemetry.plots = False
    config.telemetry.progress = False
    return config


def get_study() -> dict[str, Plan]:
    return {'full': FULL, 'quick': QUICK}
