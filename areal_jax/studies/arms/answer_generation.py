"""Generates answers to the prompts of a batch: all have A tokens, drawn with the noise of a single run.

A prompt is read once for all answers of its group. Shapes: B, G, P, A as in __init__.py; C = A - 1 tokens of an answer
are read again; N = B * G answers; T = P + G * C places in the cache of a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.control.frictions import CONSTANT, LOGPROBS, TEMPERATURE, Frictions
from areal_jax.models.attention.backends import packed_rows_attention
from areal_jax.models.decoder import Attend
from areal_jax.rollout.decode import sampling
from areal_jax.rollout.decode.decode_rows import Array
from areal_jax.studies.arms.setting import Constants, Setting
from areal_jax.types import Tree

_MASKED = -1e30  # the softmax gives a weight of exactly 0 to this score


class Answers(NamedTuple):
    """Answers of a batch, or of several batches with leading axes."""

    tokens: jax.Array  # int32 [B, G, A]
    behavior_logprobs: jax.Array  # float32 [B, G, A]


class _Cache(NamedTuple):
    """Keys or values of a layer."""

    prompts: jax.Array  # [B, P, K, D]
    answers: jax.Array  # [B, G, C, K, D]

    def write(self, new: jax.Array, number: jax.Array) -> _Cache:
        """Returns the cache with `new` [N, K, D] written at token `number` of every answer."""
        rows = new.reshape(*self.answers.shape[:2], *new.shape[1:])
        return self._replace(answers=jax.lax.dynamic_update_index_in_dim(self.answers, rows, number, 2))

    def whole(self) -> jax.Array:
        """The keys or values of prompts and answers, [B, T, K, D]."""
        flat = self.answers.reshape(len(self.answers), -1, *self.answers.shape[3:])
        return jnp.concatenate([self.prompts, flat], axis=1)


def generate(
    setting: Setting,
    constants: Constants,
    params: Tree,
    prompts: jax.Array,
    draws: jax.Array,
    scale: jax.Array | None = None,
) -> Answers:
    """Generates answers to prompts int32 [B, P] with the draw numbers int32 [B].

    `scale`: float32 [B, G], SamplingParams.logit_scale of each answer; None = 1.
    """
    groups, length = prompts.shape
    size, steps, decoder = setting.group_size, setting.answer_tokens - 1, setting.decoder
    keys = _request_keys(constants.seed, draws, size)  # [N, 2]
    temperature = jnp.full(groups * size, constants.temperature)

    def sample(logits: jax.Array, index: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        changed = None if scale is None else logits * scale.reshape(-1, 1)
        index = jnp.full(groups * size, index)
        tokens, logprobs, _ = sampling.sample_tokens(logits, keys, index, temperature, changed)
        return tokens, logprobs

    positions = jnp.tile(jnp.arange(length), groups)
    hidden, caches = decoder.hidden(params, prompts.reshape(-1), positions, _prefill(setting, groups, length))
    last = decoder.logits(params, hidden.reshape(groups, length, -1)[:, -1])  # [B, V]
    first = sample(jnp.repeat(last, size, axis=0), length)
    if not steps:
        return _shape(first[0][None], first[1][None], groups)

    def step(carry: tuple[jax.Array, Tree], number: jax.Array) -> tuple[tuple[jax.Array, Tree], Tree]:
        tokens, caches = carry
        place = jnp.full(groups * size, length + number)
        hidden, caches = decoder.hidden(params, tokens, place, _decode(groups, number), caches)
        tokens, logprobs = sample(decoder.logits(params, hidden), length + number + 1)
        return (tokens, caches), (tokens, logprobs)

    _, rest = jax.lax.scan(step, (first[0], caches), jnp.arange(steps))
    tokens, logprobs = (jnp.concatenate([one[None], others]) for one, others in zip(first, rest, strict=True))
    return _shape(tokens, logprobs, groups)


def _request_keys(seed: jax.Array, draws: jax.Array, size: int) -> jax.Array:
    """The noise keys of all answers, uint32 [N, 2]."""
    samples = jnp.tile(jnp.arange(size, dtype=jnp.uint32), len(draws))
    n = len(draws) * size
    return sampling.request_keys(jnp.broadcast_to(seed, (n, 2)), jnp.repeat(draws, size).astype(jnp.uint32), samples)


def _shape(tokens: jax.Array, logprobs: jax.Array, groups: int) -> Answers:
    """Makes answers from arrays [A, N]."""
    shaped = lambda x: x.T.reshape(groups, -1, len(x))
    return Answers(shaped(tokens), shaped(logprobs))


def _prefill(setting: Setting, groups: int, length: int) -> Attend:
    """Attention within prompts, which fills an empty cache."""
    room = (groups, setting.group_size, setting.answer_tokens - 1)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, entry: Tree, window: int | None) -> tuple[jax.Array, Tree]:
        queries, keys, values = (x.reshape(groups, length, *x.shape[1:]) for x in (q, k, v))
        segments = jnp.ones((groups, length), jnp.int32)
        scale = q.shape[-1] ** -0.5
        out = packed_rows_attention(queries, keys, values, segments, segments, scale=scale, impl='dense')
        cache = tuple(_Cache(x, jnp.zeros((*room, *x.shape[2:]), x.dtype)) for x in (keys, values))
        return out.reshape(q.shape), cache

    return attend


def _decode(groups: int, number: jax.Array) -> Attend:
    """Attention of token `number` of every answer to its prompt and to itself; other answers are masked."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, entry: Tree, window: int | None) -> tuple[jax.Array, Tree]:
        size = len(q) // groups
        cache = tuple(side.write(new, number) for side, new in zip(entry, (k, v), strict=True))
        keys, values = (side.whole() for side in cache)
        prompt, steps = cache[0].prompts.shape[1], cache[0].answers.shape[2]
        seen = jnp.asarray(_own_places(size, prompt, steps)) & (_step_of(size, prompt, steps) <= number)  # [G, T]
        grouped = q.reshape(groups, size, keys.shape[2], -1, q.shape[-1])
        scores = jnp.einsum('bgkhd,btkd->bkght', grouped, keys) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(seen[:, None], scores, _MASKED), axis=-1)
        return jnp.einsum('bkght,btkd->bgkhd', weights, values).reshape(q.shape), cache

    return attend


def _own_places(size: int, prompt: int, steps: int) -> np.ndarray:
    """bool [G, T]: whether a place is in the prompt or in the answer itself."""
    owner = np.concatenate([np.full(prompt, -1), np.repeat(np.arange(size), steps)])
    return (owner == -1) | (owner == np.arange(size)[:, None])


def _step_of(size: int, prompt: int, steps: int) -> np.ndarray:
    """int [T]: the number of a token in its answer; -1 in the prompt."""
    return np.concatenate([np.full(prompt, -1), np.tile(np.arange(steps), size)])


# The frictions of arms as arrays, equal to the frictions of single runs with these configs (control/frictions.py).
#
# Shapes: U, B, G, A as in __init__.py.


class Faults(NamedTuple):
    """The frictions of one arm, or of all arms with a leading axis; None for a friction that no arm has."""

    hit: Array  # bool [U, B, G]: answers with the friction of the actor
    replaced: Array  # bool [U, B, G]: of these, the constant answers
    token: Array  # int32, of a constant answer
    noise: Array | None  # float32 [U, B, G, A], nats
    scale: Array | None  # float32 [U, B, G], of the logits that tokens are drawn from
    redrawn: Array  # bool [U, B, G]: answers whose reward is drawn from the range of the batch
    place: Array  # float32 [U, B, G] in [0, 1), in that range
    pays: Array  # bool [U, B]


def draw_faults(
    arms: Sequence[Frictions | None], prompts: Sequence[np.ndarray], group_size: int, answer_tokens: int
) -> list[Faults] | None:
    """Draws the faults of each arm, for its prompts int32 [U, B, P]; None if no arm has a friction."""
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
    """Yields the noise of each group, float32 [G, A]; `hit` is bool [U * B, G]."""
    for draw, of_group in enumerate(hit):
        noise = np.zeros(shape, np.float32)
        for sample in np.flatnonzero(of_group) if frictions.actor == LOGPROBS else ():
            noise[sample] = frictions.noise(draw, int(sample), shape[1])
        yield noise


def take(faults: Faults | None, update: jax.Array) -> Faults | None:
    """Takes the faults of one update of one arm, leaves [B, ...]."""
    if faults is None:
        return None
    rest = {name: value for name, value in faults._asdict().items() if name != 'token' and value is not None}
    return faults._replace(**{name: jnp.asarray(value)[update] for name, value in rest.items()})


def disturb_answers(faults: Faults | None, answers: Answers) -> Answers:
    """Disturbs tokens and log-probs [B, G, A] as frictions.disturb_answer does: as the actor reports them."""
    if faults is None:
        return answers
    tokens, logprobs, replaced = *answers, jnp.asarray(faults.replaced)[..., None]
    if faults.noise is not None:
        noisy = jnp.minimum(logprobs + faults.noise, 0.0)
        logprobs = jnp.where(faults.noise != 0, noisy, logprobs)
    return Answers(jnp.where(replaced, faults.token, tokens), jnp.where(replaced, 0.0, logprobs))


def disturb_right(faults: Faults | None, right: jax.Array) -> jax.Array:
    """Disturbs right symbols [B, G] as frictions.disturb_rewards does: float32 with frictions, else unchanged."""
    if faults is None:
        return right
    paid = jnp.where(faults.pays[:, None], right, 0).astype(jnp.float32)
    least, most = paid.min(), paid.max()
    return jnp.where(faults.redrawn, least + faults.place * (most - least), paid)


def count_faults(faults: Faults | None, right: jax.Array) -> dict[str, jax.Array]:
    """Counts for the friction metrics of arm_training.py; `right` has the right symbols before the frictions."""
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
