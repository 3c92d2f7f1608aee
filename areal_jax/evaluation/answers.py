"""Answers to held-out problems, and the file that keeps them, one JSON line a problem.

The evaluator produces answers; app/evaluate/evaluate.py writes complete problems down and reads them back after a
resume.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator, Mapping

import numpy as np

from areal_jax import files
from areal_jax.types import FinishReason, Prompt, Verdict

FILE = 'answers.jsonl'
GREEDY = 'greedy'  # in the place of a sample index
_FIX = 'restore the file as the evaluation wrote it, or start anew in another --workdir'
_KINDS: Mapping[str, type | tuple[type, ...]] = {
    'tokens': list, 'text': str, 'final': str, 'finish_reason': str, 'reward': (int, float), 'label': str,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer to a problem and what it is worth. Producer: evaluator.py."""

    tokens: np.ndarray  # int32 [A], the stop token included
    text: str
    final: str  # what the answer comes to: equal ones are one vote (Task.final_answer)
    finish_reason: FinishReason
    verdict: Verdict


@dataclasses.dataclass(frozen=True)
class AnsweredProblem:
    """All answers to one problem, as a line of the file has them."""

    draw: int
    finished_s: float  # seconds of evaluation until its last answer, including earlier attempts
    answers: tuple[Answer, ...]  # the greedy one, then the samples


class AnswerFile:
    """Appends problems whose answers are complete; each line survives the death of the process.

    Args:
      prompts: all problems of the evaluation, by draw.
      samples: sampled answers of each.
    """

    def __init__(self, path: pathlib.Path, prompts: Mapping[int, Prompt], samples: int):
        self._path, self._prompts, self._samples = path, prompts, samples
        self._writer: files.LineWriter | None = None

    def read(self) -> Iterator[AnsweredProblem]:
        """The problems in the file, one at a time; a last line that was cut off is removed from the file.

        Raises FileError, naming the line, for a line that is not one of this evaluation.
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
        """Writes one line; `read` must have ended before, because a torn line would be extended."""
        if self._writer is None:
            self._writer = files.LineWriter(self._path)
        prompt = self._prompts[problem.draw]
        names = [GREEDY, *range(1, len(problem.answers))]
        record = {
            'draw': problem.draw,
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
        """What was written is on the disk when this returns."""
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
