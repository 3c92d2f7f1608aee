"""The frictions of arms as arrays: the very ones of single runs with these configs (areal_jax/control/frictions.py).

Shapes: U, B, G, A as in __init__.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.control.frictions import CONSTANT, LOGPROBS, TEMPERATURE, Frictions
from areal_jax.rollout.decode.decode_rows import Array
from areal_jax.studies.arms.answer_generation import Answers


class Faults(NamedTuple):
    """Of one arm, or of all arms with a leading axis. What no arm of a program has is None."""

    hit: Array  # bool [U, B, G]: answers with the friction of the actor
    replaced: Array  # bool [U, B, G]: of these, the constant ones
    token: Array  # int32, of a constant answer
    noise: Array | None  # float32 [U, B, G, A], nats
    scale: Array | None  # float32 [U, B, G], of the logits that tokens are drawn from
    redrawn: Array  # bool [U, B, G]: answers whose reward is drawn from the range of the batch
    place: Array  # float32 [U, B, G] in [0, 1), in that range
    pays: Array  # bool [U, B]


def draw_faults(
    arms: Sequence[Frictions | None], prompts: Sequence[np.ndarray], group_size: int, answer_tokens: int
) -> list[Faults] | None:
    """For each arm, whose prompts are int32 [U, B, P]; None where no arm has a friction."""
    if not any(arms):
        return None
    on = [arm for arm in arms if arm is not None and arm.actor_share]
    some = {actor: any(arm.actor == actor for arm in on) for actor in (LOGPROBS, TEMPERATURE)}
    shape = (group_size, answer_tokens)
    return [
        _draw(arm or Frictions(seed=0), own, shape, noisy=some[LOGPROBS], tempered=some[TEMPERATURE])
        for arm, own in zip(arms, prompts, strict=True)
    ]


def _draw(frictions: Frictions, prompts: np.ndarray, shape: tuple[int, int], *, noisy: bool, tempered: bool) -> Faults:
    (updates, groups), (size, _) = prompts.shape[:2], shape
    draws = range(updates * groups)
    by_update = lambda rows: np.stack(list(rows)).reshape(updates, groups, *np.shape(rows[0]))
    hit = by_update([frictions.hits_actor(draw, size) for draw in draws])
    redrawn, place = (by_update(rows) for rows in zip(*(frictions.redraws_reward(d, size) for d in draws), strict=True))
    is_tempered = hit & (frictions.actor == TEMPERATURE)
    return Faults(
        hit=hit,
        replaced=hit & (frictions.actor == CONSTANT),
        token=np.int32(frictions.actor_token),
        noise=by_update(list(_noise(frictions, hit.reshape(-1, size), shape))) if noisy else None,
        scale=np.where(is_tempered, np.float32(frictions.logit_scale), np.float32(1)) if tempered else None,
        redrawn=redrawn,
        place=place.astype(np.float32),
        pays=np.array([[not frictions.never_pays(prompt) for prompt in batch] for batch in prompts]),
    )


def _noise(frictions: Frictions, hit: np.ndarray, shape: tuple[int, int]) -> Iterator[np.ndarray]:
    """float32 [G, A] of each group; `hit` is bool [U * B, G]."""
    for draw, of_group in enumerate(hit):
        noise = np.zeros(shape, np.float32)
        for sample in np.flatnonzero(of_group) if frictions.actor == LOGPROBS else ():
            noise[sample] = frictions.noise(draw, int(sample), shape[1])
        yield noise


def take(faults: Faults | None, update: jax.Array) -> Faults | None:
    """Those of one update of one arm, leaves [B, ...]."""
    if faults is None:
        return None
    rest = {name: value for name, value in faults._asdict().items() if name != 'token' and value is not None}
    return faults._replace(**{name: jnp.asarray(value)[update] for name, value in rest.items()})


def disturb_answers(faults: Faults | None, answers: Answers) -> Answers:
    """As frictions.disturb_answer: tokens and log-probs [B, G, A] as the actor reports them."""
    if faults is None:
        return answers
    tokens, logprobs, replaced = *answers, jnp.asarray(faults.replaced)[..., None]
    if faults.noise is not None:
        noisy = jnp.minimum(logprobs + faults.noise, 0.0)
        logprobs = jnp.where(faults.noise != 0, noisy, logprobs)
    return Answers(jnp.where(replaced, faults.token, tokens), jnp.where(replaced, 0.0, logprobs))


def disturb_right(faults: Faults | None, right: jax.Array) -> jax.Array:
    """As frictions.disturb_rewards, in right symbols [B, G]: float32 with frictions, else as they are."""
    if faults is None:
        return right
    paid = jnp.where(faults.pays[:, None], right, 0).astype(jnp.float32)
    least, most = paid.min(), paid.max()
    return jnp.where(faults.redrawn, least + faults.place * (most - least), paid)


def count_faults(faults: Faults | None, right: jax.Array) -> dict[str, jax.Array]:
    """What arm_training.py makes the metrics of frictions from, of a batch with so many right symbols before them."""
    if faults is None:
        return {}
    size = right.shape[1]
    undisturbed = ~faults.hit & faults.pays[:, None]
    return {
        'friction_actor': faults.hit.sum(),
        'friction_reward': faults.redrawn.sum(),
        'friction_unrewarded': (~faults.pays).sum() * size,
        'friction_policy_right': jnp.where(undisturbed, right, 0).sum(),
        'friction_policy_count': undisturbed.sum(),
    }
