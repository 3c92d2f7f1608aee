"""The fields of the section `friction`, and what they do not go with. docs/frictions.md is their page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ml_collections import config_dict

from areal_jax.config.fields import Choice, Field, Integer, Real
from areal_jax.config.kinds import IN_PROCESS, find_server
from areal_jax.config.ranges import COUNT_OR_OFF, POSITIVE, SHARE

SHARES = ('actor_share', 'reward_share', 'unrewarded_share')

FRICTION_FIELDS: Mapping[str, Field] = {
    'actor': Choice(
        'constant',
        ('constant', 'logprobs', 'temperature'),
        'constant: the answer becomes one token, its log-probs 0; logprobs: noise; temperature: drawn at another one',
    ),
    'actor_share': Real(0.0, SHARE, 'share of the answers that this happens to; 0 = off'),
    'actor_token': Integer(0, COUNT_OR_OFF, 'constant: the id of that token'),
    'actor_nats': Real(1.0, POSITIVE, 'logprobs: standard deviation of Gaussian noise; the sum is at most 0'),
    'actor_temperature': Real(
        2.0, POSITIVE, 'temperature: of the tokens; their log-probs are those at rollout.temperature'
    ),
    'reward_share': Real(0.0, SHARE, 'share of the answers whose reward is drawn from the range of the batch; 0 = off'),
    'unrewarded_share': Real(0.0, SHARE, 'share of the prompts whose answers have the reward 0; 0 = off'),
}


def find_friction_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """A sentence for each rule of a training run that the section breaks."""
    friction, rollout = c.friction, c.rollout
    if not friction.actor_share:
        return
    setting = f'friction.actor={friction.actor!r} with friction.actor_share={friction.actor_share}'
    if rollout.top_k > 0 or rollout.top_p < 1:
        yield (
            f'{setting} and rollout.top_k={rollout.top_k}, rollout.top_p={rollout.top_p}: frictions of the actor are '
            'defined on log-probs of the whole softmax; set rollout.top_k=0 and rollout.top_p=1, or '
            'friction.actor_share=0'
        )
    is_small = c.model.source == 'random' and c.model.outputs == 'symbols'
    if friction.actor == 'constant' and is_small and friction.actor_token >= c.task.symbols:
        yield (
            f"{setting} and friction.actor_token={friction.actor_token}: a model with model.outputs='symbols' answers "
            f'with the first task.symbols={c.task.symbols} tokens only; use a smaller id'
        )
    if friction.actor == 'temperature' and not find_server(rollout.server).in_process:
        yield (
            f'{setting} and rollout.server={rollout.server!r}: these servers report log-probs at the temperature that '
            f'they draw at; use rollout.server={IN_PROCESS.name!r}, or another friction.actor'
        )


def find_evaluation_problem(c: config_dict.ConfigDict) -> Iterator[str]:
    """Of a model that is only evaluated."""
    for name in SHARES:
        if share := c.friction[name]:
            yield (
                f'friction.{name}={share} is a friction of training, and an evaluation has none: set friction.{name}=0'
            )
