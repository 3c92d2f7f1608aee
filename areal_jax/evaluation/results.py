"""The numbers of an evaluation: scores with intervals, and counts of what happened."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from typing import TypedDict

import numpy as np

from areal_jax.evaluation.results import (
    RESAMPLES,
    AnsweredProblem,
    bootstrap_intervals,
    majority_score,
    pass_at_k,
    sizes_of_k,
)
from areal_jax.report.statistics import CONFIDENCE
from areal_jax.telemetry.progress import format_duration
from areal_jax.workers.sandbox.sandbox_trial import SandboxRecord


class Metric(TypedDict):
    """The mean over the problems, with the ends of its interval; None where one problem has none."""

    mean: float
    low: float | None
    high: float | None


class Scores(TypedDict):
    """What answers come to, as `Tally.scores` returns it."""

    problems: int
    samples: int  # of each problem, besides the greedy answer
    metrics: dict[str, Metric]  # 'greedy', 'avg@4', 'pass@1', 'maj@4', ...
    interval: dict[str, str | int | float]  # how low and high were made
    labels: dict[str, int]  # answers by label of the verdict
    finish_reasons: dict[str, int]  # answers by finish reason
    tokens: dict[str, int]  # generated: in greedy answers, in sampled ones, in the longest answer


class Results(Scores):
    """results.json. Producer: app/evaluate/evaluate.py."""

    model: dict[str, str | int | None]  # source, path, files and their digest, weights_sha256, version
    task: str
    seed: int
    temperature: float  # of the samples
    ends: dict[str, str]  # texts of the tokens that end an answer, by their ids
    seconds: float  # of evaluating, after compilation, until the last problem
    tokens_per_second: float | None
    config_file: str
    config: dict[str, object]
    versions: dict[str, str]
    git_commit: str | None
    hardware: dict[str, object]
    sandbox: SandboxRecord | None  # in which the scorer ran code


class Tally:
    """Sums up problems as they are completed; keeps a few numbers of each, no text and no tokens."""

    def __init__(self, samples: int):
        self._samples, self._sizes = samples, sizes_of_k(samples)
        self._rows: dict[int, tuple[float, ...]] = {}  # by draw: a score for each of `_columns`
        self._labels: collections.Counter[str] = collections.Counter()
        self._finish_reasons: collections.Counter[str] = collections.Counter()
        self._tokens = {'greedy': 0, 'sampled': 0, 'longest': 0}
        self.seconds = 0.0  # of evaluating, until the last problem

    def __contains__(self, draw: int) -> bool:
        return draw in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def generated_tokens(self) -> int:
        return self._tokens['greedy'] + self._tokens['sampled']

    def add(self, problem: AnsweredProblem) -> None:
        greedy, *sampled = problem.answers
        rewards, votes = [answer.verdict.reward for answer in sampled], [answer.final for answer in sampled]
        row = [greedy.verdict.reward]
        if sampled:
            row += [float(np.mean(rewards)), *(pass_at_k(rewards, k) for k in self._sizes)]
            row.append(majority_score(votes, rewards))
        self._rows[problem.draw] = tuple(row)
        for answer in problem.answers:
            self._labels[answer.verdict.label] += 1
            self._finish_reasons[answer.finish_reason] += 1
            self._tokens['longest'] = max(self._tokens['longest'], len(answer.tokens))
        self._tokens['greedy'] += len(greedy.tokens)
        self._tokens['sampled'] += sum(len(answer.tokens) for answer in sampled)
        self.seconds = max(self.seconds, problem.finished_s)

    def scores(self, seed: int) -> Scores:
        """The scores of all problems, whatever the order in which they were added; `seed` seeds the bootstrap."""
        rows = np.array([self._rows[draw] for draw in sorted(self._rows)])
        intervals = bootstrap_intervals(rows, seed)
        return {
            'problems': len(self._rows),
            'samples': self._samples,
            'metrics': {
                name: {'mean': found.mean, 'low': found.low, 'high': found.high}
                for name, found in zip(self._columns(), intervals, strict=True)
            },
            'interval': {
                'confidence': CONFIDENCE,
                'kind': 'percentile bootstrap over problems',
                'resamples': RESAMPLES,
                'seed': seed,
            },
            'labels': dict(sorted(self._labels.items())),
            'finish_reasons': dict(sorted(self._finish_reasons.items())),
            'tokens': dict(self._tokens),
        }

    def _columns(self) -> list[str]:
        """Names of the metrics, in the order of a row."""
        if not self._samples:
            return ['greedy']
        passes = [f'pass@{k}' for k in self._sizes]
        return ['greedy', f'avg@{self._samples}', *passes, f'maj@{self._samples}']


def render_results(results: Results) -> str:
    """The table for the terminal."""
    model, tokens, rate = results['model'], results['tokens'], results['tokens_per_second']
    speed = '' if rate is None else f', {rate:.0f} a second'
    return '\n'.join(
        [
            f'{model["path"] or "random weights"}, version {model["version"]}: {results["problems"]} problems of '
            f'{results["task"]}, one greedy answer and {results["samples"]} samples of each at temperature '
            f'{results["temperature"]:g}',
            '',
            *_metric_lines(results['metrics']),
            '',
            f'answers: {_counts(results["finish_reasons"])}; verdicts: {_counts(results["labels"])}',
            f'{tokens["greedy"] + tokens["sampled"]} tokens in {format_duration(results["seconds"])}{speed}',
        ]
    )


def _metric_lines(metrics: Mapping[str, Metric]) -> Iterator[str]:
    width = max(map(len, metrics))
    yield f'{"":{width}}   mean   {CONFIDENCE:.0%} interval'
    for name, found in metrics.items():
        low, high = found['low'], found['high']
        interval = '-' if low is None or high is None else f'{low:.3f} to {high:.3f}'
        yield f'{name:{width}}  {found["mean"]:.3f}   {interval}'


def _counts(found: Mapping[str, int]) -> str:
    return ', '.join(f'{count} {name}' for name, count in found.items())
