"""The work that the comparisons share: prompts and answers of a group step, from a seed. numpy only."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np

FIRST_TOKEN = 8  # smaller ids are special somewhere: padding, beginning or end of a text
LIMIT = 3  # longest answer over the mean: about as in the paper, 27648 tokens to a mean of 9000
SIGMA = 0.75  # of the lognormal lengths with which arXiv 2505.24298's runs can be explained


@dataclasses.dataclass(frozen=True)
class Workload:
    """Answers of one update. Every sigma has the same number of tokens, to the token, so that lengths alone differ."""

    groups: int
    group_size: int
    prompt_tokens: int
    mean_tokens: int  # of an answer
    sigma: float  # lengths are lognormal up to LIMIT times the mean; 0 = all equal
    vocabulary: int
    seed: int = 0

    @property
    def answer_tokens(self) -> int:
        """Of all answers: what is trained."""
        return self.groups * self.group_size * self.mean_tokens

    @property
    def limit_tokens(self) -> int:
        """The longest answer there may be: what a generator would be told."""
        return self.mean_tokens * (LIMIT if self.sigma else 1)

    def prompts(self) -> np.ndarray:
        """int32 [groups, prompt_tokens]."""
        rng = np.random.default_rng(self.seed)
        return rng.integers(FIRST_TOKEN, self.vocabulary, (self.groups, self.prompt_tokens)).astype(np.int32)

    def answers(self) -> list[list[np.ndarray]]:
        """groups x group_size of int32 [n]."""
        rng = np.random.default_rng(self.seed + 1)
        drawn = draw_lengths(self.groups * self.group_size, self.mean_tokens, self.limit_tokens, self.sigma, rng)
        tokens = [rng.integers(FIRST_TOKEN, self.vocabulary, int(n)).astype(np.int32) for n in drawn]
        return [tokens[i : i + self.group_size] for i in range(0, len(tokens), self.group_size)]


def draw_lengths(count: int, mean: int, limit: int, sigma: float, rng: np.random.Generator) -> np.ndarray:
    """int [count] in [1, limit] of mean exactly `mean`: lognormal, scaled so that what is cut off is made up for."""
    drawn = np.exp(sigma * rng.standard_normal(count))
    low, high = 0.0, float(limit * count) / drawn.min()
    for _ in range(100):
        scale = (low + high) / 2
        low, high = (scale, high) if np.clip(scale * drawn, 1, limit).sum() < mean * count else (low, scale)
    exact = np.clip(high * drawn, 1, limit)
    lengths = np.floor(exact + 1e-6).astype(int)
    rounded_up = np.argsort(lengths - exact, kind='stable')[: mean * count - lengths.sum()]
    lengths[rounded_up] += 1
    return lengths


@dataclasses.dataclass(frozen=True)
class Work:
    """What an update learns from, as every side loads it. Trajectory i belongs to group i // group_size."""

    prompts: np.ndarray  # int32 [groups, prompt_tokens]
    answers: tuple[np.ndarray, ...]  # int32 [n] for each trajectory
    behavior_logprobs: tuple[np.ndarray, ...]  # float32 [n], of the weights that both sides load
    rewards: np.ndarray  # float32 [trajectories]
    advantages: np.ndarray  # float32 [trajectories], of those rewards
    limit_tokens: int

    @property
    def group_size(self) -> int:
        return len(self.answers) // len(self.prompts)

    def prompt_of(self, trajectory: int) -> np.ndarray:
        return self.prompts[trajectory // self.group_size]

    def save(self, path: str) -> None:
        np.savez(
            path,
            prompts=self.prompts,
            lengths=np.array([len(a) for a in self.answers]),
            answers=np.concatenate(self.answers),
            behavior_logprobs=np.concatenate(self.behavior_logprobs),
            rewards=self.rewards,
            advantages=self.advantages,
            limit_tokens=np.array(self.limit_tokens),
        )


def load_work(path: str) -> Work:
    with np.load(path) as saved:
        ends = np.cumsum(saved['lengths'])[:-1]
        return Work(
            saved['prompts'],
            tuple(np.split(saved['answers'], ends)),
            tuple(np.split(saved['behavior_logprobs'], ends)),
            saved['rewards'],
            saved['advantages'],
            int(saved['limit_tokens']),
        )


@dataclasses.dataclass(frozen=True)
class RequestWorkload:
    """Requests that are submitted at once: random prompts, and how many tokens each answer has."""

    requests: int
    prompt_tokens: tuple[int, int]  # shortest and longest
    mean_tokens: int  # of an answer
    limit_tokens: int  # of an answer
    sigma: float  # answers are lognormal up to limit_tokens with exactly this mean; 0 = all equal
    vocabulary: int
    seed: int = 0

    def draw(self) -> Requests:
        rng = np.random.default_rng(self.seed)
        shortest, longest = self.prompt_tokens
        drawn = rng.integers(shortest, longest + 1, self.requests)
        prompts = tuple(rng.integers(FIRST_TOKEN, self.vocabulary, int(n)).astype(np.int32) for n in drawn)
        lengths = draw_lengths(self.requests, self.mean_tokens, self.limit_tokens, self.sigma, rng)
        return Requests(prompts, tuple(map(int, lengths)))


@dataclasses.dataclass(frozen=True)
class Requests:
    """What the sides of a comparison of generation answer. No token ends an answer."""

    prompts: tuple[np.ndarray, ...]  # int32 [n]
    new_tokens: tuple[int, ...]  # of each answer

    @property
    def total_tokens(self) -> int:
        return sum(self.new_tokens)

    def save(self, path: str | pathlib.Path) -> None:
        whole = {'prompts': [prompt.tolist() for prompt in self.prompts], 'new_tokens': self.new_tokens}
        pathlib.Path(path).write_text(json.dumps(whole))

    def head(self, requests: int, new_tokens: int) -> Requests:
        """The first requests, each answer cut to at most `new_tokens`: what a side warms up with."""
        return Requests(self.prompts[:requests], tuple(min(n, new_tokens) for n in self.new_tokens[:requests]))


def load_requests(path: str | pathlib.Path) -> Requests:
    whole = json.loads(pathlib.Path(path).read_text())
    return Requests(tuple(np.array(p, np.int32) for p in whole['prompts']), tuple(whole['new_tokens']))
