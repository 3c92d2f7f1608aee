"""A second comparison for a small share of the scored answers: disagreements are kept with their texts to be read.

It is for the kind of answers 'math'. It changes no reward.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

from areal_jax import files
from areal_jax.tasks.task import hash_fraction
from areal_jax.types import Prompt

FILE = 'audit.jsonl'  # in the workdir
MOST_BYTES = 16 * 2**20  # of the file; later disagreements are counted only

# (gold answer, text of an answer) -> whether they are equal; None where this comparison cannot tell
Comparison = Callable[[str, str], bool | None]


class Audit:
    """Compares a share of the answers a second time and appends each disagreement to WORKDIR/audit.jsonl.

    Which answers are compared depends on draw and text alone. A line that the file has already is not written again:
    a resumed run scores some answers a second time.

    Args:
      fraction: share of the answers.
      compare: the second comparison, in this process.
    """

    def __init__(self, workdir: pathlib.Path, fraction: float, compare: Comparison):
        self._path = workdir / FILE
        self._fraction, self._compare = fraction, compare
        self._written: set[str] | None = None  # lines of the file; read when the first disagreement is found

    def check(self, prompt: Prompt, text: str, reward: float) -> str:
        """'agrees', 'disagrees' or 'undecided'; '' for an answer outside the share."""
        if hash_fraction(f'{prompt.draw}\n{text}') >= self._fraction:
            return ''
        equal = self._compare(str(prompt.problem['answer']), text)
        if equal is None:
            return 'undecided'
        if equal == (reward > 0):
            return 'agrees'
        self._keep(prompt, text, reward)
        return 'disagrees'

    def _keep(self, prompt: Prompt, text: str, reward: float) -> None:
        if self._written is None:
            self._written = set(self._path.read_text().splitlines()) if self._path.exists() else set()
        question, gold = prompt.problem['question'], prompt.problem['answer']
        record = {'draw': prompt.draw, 'question': question, 'gold': gold, 'reward': reward, 'text': text}
        line = json.dumps(record)
        room = MOST_BYTES - sum(len(written) + 1 for written in self._written)
        if line in self._written or len(line) + 1 > room:
            return
        self._written.add(line)
        writer = files.LineWriter(self._path)
        writer.write(line)
        writer.close()
