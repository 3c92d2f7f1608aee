"""Moments of a group of answers on which ages and waits depend, by sums over a fine grid of lengths."""

from __future__ import annotations

import dataclasses

import numpy as np

from areal_jax.simulation.lengths import Lengths, Mixture

_REACH, _STEP = 6.0, 0.01  # of the grid of normal numbers
_RESTS = 4000  # steps of the grid of what is left of an answer
_PROMPTS = 64  # nodes of the grid of prompts


@dataclasses.dataclass(frozen=True)
class GroupMoments:
    """Of G answers to one prompt, in tokens, after lengths are cut off; L_max is the longest of the group."""

    mean: float  # E[L]
    second: float  # E[L^2]
    longest: float  # E[L_max]
    product: float  # E[L L_max]

    @property
    def tail(self) -> float:
        """M_tail = E[L_max] / E[L]: how much longer a group holds its place than an answer its slot."""
        return self.longest / self.mean

    @property
    def token_tail(self) -> float:
        """kappa = (E[L L_max] - E[L^2] / 2) / E[L]^2: what a token waits for its group, in mean lengths."""
        return (self.product - self.second / 2) / self.mean**2

    @property
    def live_position(self) -> float:
        """E[L^2] / (2 E[L]): tokens that a running answer has on average, since long ones run for longer."""
        return self.second / (2 * self.mean)


def group_moments(lengths: Lengths, size: int, draw: int = 0) -> GroupMoments:
    """Moments of a group of `size`, of the lengths as they are at that draw."""
    values, probabilities = _grid(lengths, draw)
    rows = np.array([_moments(value, probabilities, size) for value in values])
    mean, second, longest, product = np.average(rows, axis=0, weights=_prompt_weights(len(values)))
    return GroupMoments(float(mean), float(second), float(longest), float(product))


def rests(lengths: Lengths, rows: int, draw: int = 0) -> tuple[float, float]:
    """(E[R], E[max R]) in tokens: what is left of one running answer, and the most that is left of so many.

    The rest of an answer that is met at a random moment of its run has P(R <= r) = E[min(L, r)] / E[L].
    """
    values, probabilities = _grid(dataclasses.replace(lengths, group_share=0.0), draw)
    tokens = values[0]
    ends = np.linspace(0, tokens.max(), _RESTS + 1)
    order = np.argsort(tokens)
    v, p = tokens[order], probabilities[order]
    at_most = np.searchsorted(v, ends, side='right')
    below, sum_below = np.append(0, np.cumsum(p)), np.append(0, np.cumsum(v * p))
    mean = v @ p
    done = (sum_below[at_most] + ends * (1 - below[at_most])) / mean  # P(R <= r)
    return float((v**2 @ p) / (2 * mean)), float(np.trapezoid(1 - done**rows, ends))


def _moments(values: np.ndarray, probabilities: np.ndarray, size: int) -> tuple[float, float, float, float]:
    """Of independent draws from [n] values: exact, ties included."""
    order = np.argsort(values)
    v, p = values[order], probabilities[order]
    below, sum_below = np.cumsum(p), np.cumsum(v * p)  # P(L <= v), E[L; L <= v]
    longest = v @ np.diff(below**size, prepend=0)
    product = v @ np.diff(sum_below * below ** (size - 1), prepend=0)
    return float(v @ p), float(v**2 @ p), float(longest), float(product)


def _grid(lengths: Lengths, draw: int) -> tuple[np.ndarray, np.ndarray]:
    """(float64 [prompts, n] lengths, float64 [n] probabilities), where the prompt is one of so many alike."""
    numbers = np.arange(-_REACH, _REACH + _STEP / 2, _STEP)
    density = np.exp(-(numbers**2) / 2)
    density /= density.sum()
    found = lengths.at(draw)
    weights, parts = (found.weights, found.parts) if isinstance(found, Mixture) else ((1.0,), (found,))
    prompts = _prompt_nodes(lengths.group_share)
    own = np.sqrt(1 - lengths.group_share) * numbers
    values = [[lengths.cut(part.quantile(x + y)) for part in parts for y in own] for x in prompts]
    return np.array(values, np.float64), np.concatenate([weight * density for weight in weights])


def _prompt_nodes(group_share: float) -> np.ndarray:
    """float64 [prompts]: what prompts add to the number of an answer."""
    if not group_share:
        return np.zeros(1)
    return np.sqrt(2 * group_share) * np.polynomial.hermite.hermgauss(_PROMPTS)[0]


def _prompt_weights(prompts: int) -> np.ndarray:
    return np.ones(1) if prompts == 1 else np.polynomial.hermite.hermgauss(_PROMPTS)[1]
