"""A contextual bandit on scikit-learn's digits, trained on actions of old weights with the losses of this project.

    python -m benchmarks.digits --json=benchmarks/results/digits.json

It stands where the paper of Delightful Policy Gradient has MNIST, which cannot be downloaded everywhere: 1,797 images
of 8 x 8 pixels, 1,437 to train on and 360 to test. A policy of one hidden layer sees an image and names a digit, an
answer of one token; the reward is 1 where it is right. Each batch is drawn with the weights of `delay` updates before.
The advantage is the reward less the mean of the batch. Every method is a combination of
areal_jax.learning.objective.policy_loss, so that what is measured is the function that runs train with. A run is one
program: updates are a scan, and the earlier weights are a ring in its state.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.errors import UserError
from areal_jax.installation import describe_install
from areal_jax.learning.objective.objective import LossTokens
from areal_jax.learning.objective.policy_loss import policy_loss
from benchmarks.report import write_report

TRAIN, CLASSES, HIDDEN, BATCH, RATE = 1437, 10, 64, 100, 1e-3
Weights = Mapping[str, jax.Array]
_ON_BEHAVIOR = {'ratio_denominator': 'behavior', 'correction': 'none', 'advantage': 'reward'}
_WITHOUT_RATIO = {'ratio': 'none', 'correction': 'none', 'advantage': 'reward'}
METHODS: Mapping[str, PolicyChoices] = {
    'dg': PolicyChoices(surrogate='delight', **_WITHOUT_RATIO),
    'reinforce': PolicyChoices(surrogate='reinforce', **_WITHOUT_RATIO),
    'importance weights': PolicyChoices(surrogate='is_pg', **_ON_BEHAVIOR),
    'ppo': PolicyChoices(surrogate='clip', **_ON_BEHAVIOR),
    'cispo': PolicyChoices(surrogate='cispo', clip_epsilon=1.0, clip_epsilon_high=4.0, **_ON_BEHAVIOR),
}  # around the policy before the update, decoupled PPO of one minibatch has the gradient of importance weights


class Digits(NamedTuple):
    """Images float32 [n, 64] in [0, 1], labels int32 [n]."""

    images: jax.Array
    labels: jax.Array
    test_images: jax.Array
    test_labels: jax.Array


class State(NamedTuple):
    weights: Weights
    moments: Any
    ring: Weights  # leaves [delay + 1, ...]; the oldest is at update mod (delay + 1)


def load_digits() -> Digits:
    """The images in one fixed order; raises UserError where scikit-learn is not installed."""
    try:
        from sklearn import datasets  # here: it is in no core installation
    except ImportError as error:
        raise UserError(
            f'the digits come with scikit-learn, which cannot be imported ({error}): {describe_install("dev")}'
        ) from error
    images, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = jnp.asarray(images[order] / 16, jnp.float32), jnp.asarray(labels[order], jnp.int32)
    return Digits(images[:TRAIN], labels[:TRAIN], images[TRAIN:], labels[TRAIN:])


def initial_weights(key: jax.Array, pixels: int) -> Weights:
    """Normal, of variance 2 / inputs in the hidden layer and 1 / inputs in the last one; biases 0."""
    of_hidden, of_last = jax.random.split(key)
    return {
        'hidden': jax.random.normal(of_hidden, (pixels, HIDDEN)) * (2 / pixels) ** 0.5,
        'hidden_bias': jnp.zeros(HIDDEN),
        'last': jax.random.normal(of_last, (HIDDEN, CLASSES)) / HIDDEN**0.5,
        'last_bias': jnp.zeros(CLASSES),
    }


def action_logprobs(weights: Weights, images: jax.Array) -> jax.Array:
    """float32 [n, 10]."""
    hidden = jax.nn.relu(images @ weights['hidden'] + weights['hidden_bias'])
    return jax.nn.log_softmax(hidden @ weights['last'] + weights['last_bias'])


def make_tokens(logprobs: jax.Array, actions: jax.Array, behavior: jax.Array, rewards: jax.Array) -> LossTokens:
    """A row of n answers of one token: log-probs [n, 10], the others [n]; the advantage is reward - mean reward."""
    row, n = (lambda x: x[None]), len(actions)
    ones = jnp.ones((1, n))
    return LossTokens(
        policy_logprobs=row(jnp.take_along_axis(logprobs, actions[:, None], axis=1)[:, 0]),
        entropy=row(-(jnp.exp(logprobs) * logprobs).sum(1)),
        behavior_logprobs=row(behavior),
        advantages=row(rewards - rewards.mean()),
        loss_mask=ones > 0,
        policy_versions=jnp.zeros((1, n), jnp.int32),
        sequence_starts=row(jnp.arange(n)),
        token_weights=ones,
        denominator=jnp.float32(n),
        version=jnp.int32(0),
        known={},
    )


def update(
    choices: PolicyChoices, digits: Digits, delay: int, key: jax.Array, state: State, index: jax.Array
) -> tuple[State, jax.Array]:
    """The state after one update, and the mean reward of its batch."""
    slot = index % (delay + 1)
    old = jax.tree.map(lambda leaf: leaf[slot], state.ring)
    of_images, of_actions = jax.random.split(jax.random.fold_in(key, index))
    chosen = jax.random.randint(of_images, (BATCH,), 0, len(digits.labels))
    images, labels = digits.images[chosen], digits.labels[chosen]
    drawn_from = action_logprobs(old, images)
    actions = jax.random.categorical(of_actions, drawn_from)
    behavior = jnp.take_along_axis(drawn_from, actions[:, None], axis=1)[:, 0]
    rewards = (actions == labels).astype(jnp.float32)

    def loss(weights: Weights) -> jax.Array:
        tokens = make_tokens(action_logprobs(weights, images), actions, behavior, rewards)
        return policy_loss(choices, tokens, jax.lax.stop_gradient(tokens.policy_logprobs))[0]

    change, moments = optax.adam(RATE).update(jax.grad(loss)(state.weights), state.moments)
    weights = optax.apply_updates(state.weights, change)
    ring = jax.tree.map(lambda versions, leaf: versions.at[slot].set(leaf), state.ring, weights)
    return State(weights, moments, ring), rewards.mean()


@functools.partial(jax.jit, static_argnums=(0, 2, 3, 4))
def train(
    choices: PolicyChoices, digits: Digits, delay: int, updates: int, parts: int, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(test error of the likeliest digit, mean reward of the batches), [parts] each, at equal distances."""
    of_weights, of_batches = jax.random.split(key)
    first = initial_weights(of_weights, digits.images.shape[1])
    ring = jax.tree.map(lambda leaf: jnp.repeat(leaf[None], delay + 1, axis=0), first)
    step = functools.partial(update, choices, digits, delay, of_batches)

    def part(state: State, indices: jax.Array) -> tuple[State, tuple[jax.Array, jax.Array]]:
        state, rewards = jax.lax.scan(step, state, indices)
        answers = action_logprobs(state.weights, digits.test_images).argmax(1)
        return state, ((answers != digits.test_labels).mean(), rewards.mean())

    start = State(first, optax.adam(RATE).init(first), ring)
    return jax.lax.scan(part, start, jnp.arange(updates).reshape(parts, -1))[1]


def measure(
    seeds: Sequence[int], delay: int, updates: int, deadline: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(a row for each method, a curve for each method and seed); nothing is begun after the deadline."""
    digits, curves = load_digits(), []
    for seed in seeds:
        for method, choices in METHODS.items():
            if time.monotonic() > deadline:
                break
            began = time.monotonic()
            errors, rewards = train(choices, digits, delay, updates, 10, jax.random.key(seed))
            shown = [[round(float(value), 4) for value in values] for values in (errors, rewards)]
            curves.append({'method': method, 'seed': seed, 'test_error': shown[0], 'reward': shown[1]})
            print(f'{method}, seed {seed}: {shown[0]}, {time.monotonic() - began:.1f} s', file=sys.stderr, flush=True)
    return summarise(curves), curves


def summarise(curves: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The last test errors of each method, by seed, and their median."""
    rows = []
    for method in dict.fromkeys(curve['method'] for curve in curves):
        last = [curve['test_error'][-1] for curve in curves if curve['method'] == method]
        row = {'method': method, 'test_error': last, 'median': round(statistics.median(last), 4), 'most': max(last)}
        rows.append({**row, 'least': min(last)})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', '--out', type=pathlib.Path, help='where the report is written')
    parser.add_argument('--seed', type=int, default=0, help='the first of five')
    parser.add_argument('--minutes', type=float, default=60.0, help='no run is begun after that')
    parser.add_argument('--delay', type=int, default=1000, help='updates between the weights of a batch and its update')
    parser.add_argument('--small', action='store_true', help='100 updates at a delay of 10, one seed: to try it')
    options = parser.parse_args(arguments)
    seeds, delay, updates = range(options.seed, options.seed + 5), options.delay, 10_000
    if options.small:
        seeds, delay, updates = seeds[:1], 10, 100
    try:
        rows, curves = measure(seeds, delay, updates, time.monotonic() + 60 * options.minutes)
    except UserError as error:
        print(f'benchmarks.digits: {error}', file=sys.stderr)
        return 2
    command = f'python -m benchmarks.digits {" ".join(sys.argv[1:] if arguments is None else arguments)}'
    numbers = {'delay': delay, 'updates': updates, 'batch': BATCH, 'hidden': HIDDEN, 'learning_rate': RATE}
    write_report({**numbers, 'rows': rows, 'curves': curves, 'command': command.strip()}, options.json)
    return 0 if curves else 2


if __name__ == '__main__':
    sys.exit(main())
