"""The answers and the results of an evaluation: a file of answers, scores with intervals, and counts."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NotRequired, TypedDict

import numpy as np

from areal_jax import files
from areal_jax.report.statistics import CONFIDENCE, Interval
from areal_jax.telemetry.progress import format_duration
from areal_jax.types import FinishReason, Prompt, Verdict
from areal_jax.workers.sandbox.sandbox_trial import SandboxRecord

FILE = 'answers.jsonl'
GREEDY = 'greedy'  # in the place of a sample index
_FIX = 'restore the file as the evaluation wrote it, or start anew in another --workdir'
_KINDS: Mapping[str, type | tuple[type, ...]] = {
    'tokens': list, 'text': str, 'final': str, 'finish_reason': str, 'reward': (int, float), 'label': str,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer to a problem, with its verdict. Producer: evaluator.py."""

    tokens: np.ndarray  # int32 [A], the stop token included
    text: str
    final: str  # the final answer; equal ones vote together (Task.final_answer)
    finish_reason: FinishReason
    verdict: Verdict


@dataclasses.dataclass(frozen=True)
class AnsweredProblem:
    """All answers to one problem: a line of the file."""

    draw: int
    finished_s: float  # seconds of evaluation until its last answer, including earlier attempts
    answers: tuple[Answer, ...]  # the greedy one, then the samples


class AnswerFile:
    """Appends problems whose answers are complete; a line survives the death of the process.

    Args:
      prompts: all problems of the evaluation, by draw.
      samples: number of sampled answers per problem.
    """

    def __init__(self, path: pathlib.Path, prompts: Mapping[int, Prompt], samples: int):
        self._path, self._prompts, self._samples = path, prompts, samples
        self._writer: files.LineWriter | None = None

    def read(self) -> Iterator[AnsweredProblem]:
        """Yields the problems in the file; removes a torn last line from the file.

        Raises FileError, naming the line, for a line that does not belong to this evaluation.
        """
        if not self._path.exists():
            return
        end, seen = 0, set()
        with self._path.open('rb') as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b'\n'):
                    break
                where = f'{self._path}: line {number}'
                problem = self._parse(files.parse_object(line, where, _FIX), where)
                if problem.draw in seen:
                    raise files.FileError(f'{where} repeats draw {problem.draw}; {_FIX}')
                seen.add(problem.draw)
                yield problem
                end += len(line)
        os.truncate(self._path, end)

    def append(self, problem: AnsweredProblem, prompt_text: str) -> None:
        """Writes one line; `read` must have ended before, or a torn line could be extended."""
        if self._writer is None:
            self._writer = files.LineWriter(self._path)
        prompt = self._prompts[problem.draw]
        names = [GREEDY, *range(1, len(problem.answers))]
        record = {
            'draw': problem.draw,
            **({'source': prompt.source} if prompt.source else {}),
            'problem': dict(prompt.problem),
            'prompt': prompt_text,
            'prompt_tokens': prompt.tokens.tolist(),
            'finished_s': problem.finished_s,
            'answers': [
                {'sample': name, **_encode(answer)} for name, answer in zip(names, problem.answers, strict=True)
            ],
        }
        self._writer.write(json.dumps(record))

    def close(self) -> None:
        """Closes the file; all lines are on the disk when this returns."""
        if self._writer is not None:
            self._writer.sync()
            self._writer.close()
            self._writer = None

    def _parse(self, record: files.JsonObject, where: str) -> AnsweredProblem:
        draw, answers, finished_s = record.get('draw'), record.get('answers'), record.get('finished_s')
        prompt = self._prompts.get(draw) if isinstance(draw, int) else None
        if not isinstance(draw, int) or prompt is None or record.get('prompt_tokens') != prompt.tokens.tolist():
            raise files.FileError(
                f'{where} answers another problem than draw {draw} of this evaluation: the problems have changed since '
                'it began; bring them back, or start anew in another --workdir'
            )
        names = [GREEDY, *range(1, 1 + self._samples)]
        if not isinstance(answers, list) or [_name(answer) for answer in answers] != names:
            raise files.FileError(f'{where} does not have the answers {names}; {_FIX}')
        if not isinstance(finished_s, (int, float)):
            raise files.FileError(f'{where} has finished_s={finished_s!r}, not a number; {_FIX}')
        return AnsweredProblem(draw, float(finished_s), tuple(_decode(answer, where) for answer in answers))


def _name(answer: object) -> object:
    return answer.get('sample') if isinstance(answer, dict) else None


def _encode(answer: Answer) -> files.JsonObject:
    return {
        'reward': answer.verdict.reward,
        'label': answer.verdict.label,
        'final': answer.final,
        'finish_reason': answer.finish_reason,
        'text': answer.text,
        'tokens': answer.tokens.tolist(),
    }


def _decode(record: files.JsonObject, where: str) -> Answer:
    for name, kind in _KINDS.items():
        if not isinstance(record.get(name), kind):
            raise files.FileError(f'{where}: an answer has {name}={record.get(name)!r}; {_FIX}')
    verdict = Verdict(float(record['reward']), label=record['label'])
    tokens = np.array(record['tokens'], np.int32)
    return Answer(tokens, record['text'], record['final'], record['finish_reason'], verdict)


# Scores of a model on a set of problems: pass@k, maj@k, and intervals by bootstrap over the problems.
#
# Numbers only: this part does not depend on prompts, engines or files.


RESAMPLES = 2000  # of the bootstrap
_STREAM = 0xB0075  # second half of the Philox key: keeps the resamples apart from other uses of a seed


def pass_at_k(rewards: Sequence[float], k: int) -> float:
    """The expected best reward of k answers, estimated without bias from the n >= k answers to one problem.

        pass@k = Σᵢ r₍ᵢ₎ C(i-1, k-1) / C(n, k),   r₍₁₎ <= ... <= r₍ₙ₎

    is the mean of the best reward over all subsets of k answers. For rewards of 0 and 1, c of them 1, it equals
    1 - C(n-c, k) / C(n, k), Eq. 1 of Chen et al., "Evaluating Large Language Models Trained on Code",
    arXiv:2107.03374. pass@1 is the mean.

    Raises:
        ValueError: k outside 1..n.
    """
    if not 1 <= k <= len(rewards):
        raise ValueError(f'pass@{k} needs at least {k} answers, there are {len(rewards)}')
    return math.fsum(reward * weight for reward, weight in zip(sorted(rewards), _shares(len(rewards), k), strict=True))


def majority_score(answers: Sequence[str], rewards: Sequence[float]) -> float:
    """The expected reward of the majority answer; each of n tied answers counts 1/n.

    Equal answers may have different rewards, for example if one of them was cut off: then their mean counts.

    Raises:
        ValueError: no answers.
    """
    if not answers:
        raise ValueError('a vote needs at least one answer')
    votes: dict[str, list[float]] = {}
    for answer, reward in zip(answers, rewards, strict=True):
        votes.setdefault(answer, []).append(reward)
    most = max(map(len, votes.values()))
    tied = [math.fsum(found) / most for found in votes.values() if len(found) == most]
    return math.fsum(tied) / len(tied)


def sizes_of_k(samples: int) -> list[int]:
    """The k of pass@k that `samples` answers allow: 1, 2, 4, ... and `samples` itself."""
    powers = [2**power for power in range(samples.bit_length()) if 2**power < samples]
    return [*powers, samples] if samples else []


def bootstrap_intervals(scores: np.ndarray, seed: int, resamples: int = RESAMPLES) -> list[Interval]:
    """The mean of each column with its percentile interval; rows are problems, drawn with replacement.

    All columns are resampled together. B. Efron and R. Tibshirani, "An Introduction to the Bootstrap" (1993), chapter
    13. A single problem has no interval. Takes O(resamples * problems) time and O(problems) memory; 100,000 problems
    take a few seconds.

    Args:
      scores: float64 [problems, columns].

    Raises:
        ValueError: no problem.
    """
    n = len(scores)
    if not n:
        raise ValueError('no problem was scored; a mean needs one')
    means = scores.mean(axis=0)
    if n == 1:
        return [Interval(float(mean), None, None, n) for mean in means]
    # raw Philox output is the same in every version of numpy; the bias of the remainder is below n / 2^64
    noise = np.random.Philox(key=np.array([seed % 2**64, _STREAM], np.uint64))
    resampled = np.empty((resamples, scores.shape[1]))
    for row in resampled:
        drawn = (noise.random_raw(n) % np.uint64(n)).astype(np.int64)
        row[:] = np.bincount(drawn, minlength=n) @ scores / n
    tail = (1 - CONFIDENCE) / 2
    lows, highs = np.quantile(resampled, [tail, 1 - tail], axis=0)
    return [
        Interval(float(mean), float(low), float(high), n) for mean, low, high in zip(means, lows, highs, strict=True)
    ]


@functools.cache
def _shares(n: int, k: int) -> tuple[float, ...]:
    """The share of the subsets of k out of n elements whose last element is i, for i = 1..n."""
    return tuple(math.comb(i - 1, k - 1) / math.comb(n, k) for i in range(1, n + 1))


class Metric(TypedDict):
    """The mean over the problems, with the ends of its interval; None for a single problem."""

    mean: float
    low: float | None
    high: float | None


class Scores(TypedDict):
    """The scores of an evaluation, as `Tally.scores` returns them."""

    problems: int
    samples: int  # per problem, in addition to the greedy answer
    metrics: dict[str, Metric]  # 'greedy', 'avg@4', 'pass@1', 'maj@4', ...
    interval: dict[str, str | int | float]  # how low and high were made
    labels: dict[str, int]  # answers by label of the verdict
    finish_reasons: dict[str, int]  # answers by finish reason
    tokens: dict[str, int]  # generated: in greedy answers, in sampled ones, in the longest answer


class SourceScores(TypedDict):
    """The scores of the problems of one source of a mixture."""

    problems: int
    metrics: dict[str, Metric]


class SourcesOfResults(TypedDict):
    """What results.json has in addition for a mixture."""

    sources: NotRequired[dict[str, SourceScores]]


class Results(Scores, SourcesOfResults):
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
    sandbox: SandboxRecord | None  # sandbox in which the scorer ran code


class Tally:
    """Sums up problems as they are completed; keeps a few numbers per problem, no text and no tokens."""

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
        """The scores of all problems, independent of the order of `add`; `seed` seeds the bootstrap."""
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
        if not self._samples:
            return ['greedy']
        passes = [f'pass@{k}' for k in self._sizes]
        return ['greedy', f'avg@{self._samples}', *passes, f'maj@{self._samples}']


def render_results(results: Results) -> str:
    model, tokens, rate = results['model'], results['tokens'], results['tokens_per_second']
    speed = '' if rate is None else f', {rate:.0f} a second'
    return '\n'.join(
        [
            f'{model["path"] or "random weights"}, version {model["version"]}: {results["problems"]} problems of '
            f'{results["task"]}, one greedy answer and {results["samples"]} samples of each at temperature '
            f'{results["temperature"]:g}',
            '',
            *_metric_lines(results['metrics']),
            *_source_lines(results.get('sources', {})),
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


def _source_lines(sources: Mapping[str, SourceScores]) -> Iterator[str]:
    for source, own in sources.items():
        yield from ('', f'{source}, {own["problems"]} problems', *_metric_lines(own['metrics']))


def _counts(found: Mapping[str, int]) -> str:
    return ', '.join(f'{count} {name}' for name, count in found.items())
