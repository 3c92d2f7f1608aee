"""Six objectives under the frictions of a large asynchronous system, on token reversal of 4, 8 and 12 symbols.

    areal-sweep --config=configs/sweeps/frictions.py --workdir=runs/frictions [--quick]

docs/frictions.md says what is compared. The arms of an objective are trained as one program; --quick is one length, one
seed and 60 updates, which shows that every part works and settles no question. An arm is named
OBJECTIVE.FRICTION.LENGTH.SEED, and scores.md has a table for each length.
"""

import itertools

from ml_collections import config_dict

from areal_jax import config as schema

LAG = 30
OBJECTIVES = {
    # the paper's four minibatches: with one, the clip is centred at the policy itself and never acts
    'decoupled_ppo': {'loss.objective': 'decoupled_ppo', 'learner.n_minibatches': 4},
    'ppo': {'loss.objective': 'decoupled_ppo', 'loss.proximal': 'behavior'},
    # every ratio is at least 0, so a lower bound of 1 - 1 never clips
    'importance_weights': {
        'loss.objective': 'decoupled_ppo', 'loss.proximal': 'behavior', 'loss.clip_epsilon': 1.0,
        'loss.clip_epsilon_high': 1e9,
    },
    'dg': {'loss.objective': 'dg'},
    # around the policy before the update it would be REINFORCE, as every ratio is 1 with one minibatch
    'cispo': {'loss.objective': 'cispo', 'loss.proximal': 'behavior'},
    'reinforce': {
        'loss.objective': 'decoupled_ppo', 'loss.ratio': 'none', 'loss.surrogate': 'reinforce',
        'loss.correction': 'none',
    },
}  # fmt: skip
ACTOR = {'friction.actor': 'constant', 'friction.actor_share': 0.1}
REWARD = {'friction.reward_share': 0.1}
UNREWARDED = {'friction.unrewarded_share': 0.5}
STALENESS = {'staleness.schedule': f'fixed({LAG})'}
FRICTIONS = {
    'none': {},
    'staleness': STALENESS,
    'actor': ACTOR,
    'reward': REWARD,
    'unrewarded': UNREWARDED,
    'all_four': {**STALENESS, **ACTOR, **REWARD, **UNREWARDED},
}


def get_config() -> config_dict.ConfigDict:
    config = schema.default_config()
    config.run.steps = 1000
    config.run.clock = 'virtual'
    config.run.export = False
    config.task.name = 'token_reversal'
    config.task.verifier = 'inline'
    config.model.family = 'plain'
    config.model.outputs = 'symbols'
    config.model.n_layers = 2
    config.model.n_kv_heads = 4
    config.model.embedding_scale = 3.0
    config.rollout.ignore_eos = True
    config.rollout.context_tokens = 32
    config.rollout.block_tokens = 32
    config.rollout.prefill_buckets = (32, 256)
    config.rollout.group_size = 8
    config.learner.groups_per_update = 8
    config.learner.row_tokens = 256
    config.learner.row_loss_tokens = 128
    config.learner.filter_equal_rewards = False
    config.staleness.schedule = 'fixed(0)'
    config.loss.advantage = 'group_mean'
    config.optimizer.learning_rate = 3e-4
    config.optimizer.clip_norm = 0.0
    config.optimizer.b2 = 0.999
    config.evaluation.problems = 0
    config.telemetry.tensorboard = False
    config.telemetry.plots = False
    config.telemetry.progress = False
    return config


def get_programs() -> dict[str, dict[str, dict[str, object]]]:
    return {
        'full': make_arms(lengths=(4, 8, 12), seeds=(0, 1, 2), more={}),
        'quick': make_arms(lengths=(4,), seeds=(0,), more={'run.steps': 60}),
    }


def make_arms(
    lengths: tuple[int, ...], seeds: tuple[int, ...], more: dict[str, object]
) -> dict[str, dict[str, object]]:
    """Overrides of every arm by its name."""
    return {
        f'{objective}.{friction}.{length}.seed{seed}': {
            'task.length': length, 'rollout.max_new_tokens': length, 'run.seed': seed,
            **OBJECTIVES[objective], **FRICTIONS[friction], **more,
        }
        for objective, friction, length, seed in itertools.product(OBJECTIVES, FRICTIONS, lengths, seeds)
    }  # fmt: skip
