"""Methods made for stale data, at lags of 0, 30, 100 and 400 versions, on token reversal of four symbols.

    areal-sweep --config=configs/sweeps/stale_methods.py --workdir=runs/stale_methods [--quick]

docs/staleness_methods.md says what is compared. The arms of one method and lag are one program. An arm is named
METHOD.RATE.LAG.SEED: a table for each lag, in which the best of three learning rates is a method's result. --quick is
one lag, one seed and 100 updates, which shows that every part works and settles no question.
"""

import itertools

from ml_collections import config_dict

from areal_jax import config as schema

SYMBOLS = 4  # of a prompt, and of an answer
UPDATES = 800  # beyond the lag: the first batches, of version 0, teach no method what is stale
LAGS = (0, 30, 100, 400)
# one grid for all: in a pilot (lag 30, seed 0, 100 updates beyond it) OAPL under every(30) did best at 3e-3, where
# the others did worst, and those at 3e-4
RATES = {'1e-4': 1e-4, '5e-4': 5e-4, '3e-3': 3e-3}
# four minibatches each, as the paper of the decoupled loss has them: all make equally many optimizer steps
METHODS = {
    'decoupled': {},
    'm2po': {'loss.objective': 'm2po'},
    'vcpo': {'loss.objective': 'vcpo', 'optimizer.brake': 'ess'},
    # the gradient of its loss is 2 oapl_beta = 1 / 500 of a policy gradient: so is the entropy's
    'oapl': {'loss.objective': 'oapl', 'loss.entropy_coefficient': 0.03 / 500},
    # as its paper trains: engines take new weights every so many updates
    'oapl_every': {'loss.objective': 'oapl', 'loss.entropy_coefficient': 0.03 / 500},
}


def get_config() -> config_dict.ConfigDict:
    """The arms of LOCK_STEP of configs/sweeps/staleness.py."""
    config = schema.default_config()
    config.run.clock = 'virtual'
    config.run.export = False
    config.task.name = 'token_reversal'
    config.task.length = SYMBOLS
    config.task.verifier = 'inline'
    config.rollout.ignore_eos = True
    config.rollout.context_tokens = 16
    config.rollout.block_tokens = 16
    config.rollout.prefill_buckets = (32, 256)
    config.rollout.max_new_tokens = SYMBOLS
    config.rollout.decode_steps = SYMBOLS
    config.learner.row_tokens = 256
    config.learner.row_loss_tokens = 256
    config.learner.n_minibatches = 4
    config.staleness.schedule = 'fixed(0)'
    config.loss.entropy_coefficient = 0.03
    config.evaluation.problems = 0
    config.telemetry.tensorboard = False
    config.telemetry.plots = False
    config.telemetry.progress = False
    return config


def get_programs() -> dict[str, dict[str, dict[str, object]]]:
    return {
        'full': make_arms(LAGS, tuple(RATES), (0, 1, 2), UPDATES),
        'quick': make_arms((30,), ('5e-4',), (0,), 100),
    }


def make_arms(
    lags: tuple[int, ...], rates: tuple[str, ...], seeds: tuple[int, ...], updates: int
) -> dict[str, dict[str, object]]:
    """Overrides of every arm by its name."""
    return {
        f'{method}.{rate}.lag{lag}.seed{seed}': {
            'run.steps': updates + lag, 'run.seed': seed, 'optimizer.learning_rate': RATES[rate],
            'staleness.schedule': f'every({lag})' if method == 'oapl_every' else f'fixed({lag})', **fields,
        }
        for (method, fields), rate, lag, seed in itertools.product(METHODS.items(), rates, lags, seeds)
        if lag or method != 'oapl_every'
    }  # fmt: skip
