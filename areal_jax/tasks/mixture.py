"""A mixture of tasks: each draw belongs to one source, and its answers are scored by the task of this source.

Which source a draw belongs to depends on its number and the weights alone (`Interleaving`). The draws of a source are
the draws of its task alone, in the same order.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fractions
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from areal_jax.files import JsonObject
from areal_jax.hub import HubError
from areal_jax.protocols import PromptStream
from areal_jax.tasks.task import PromptSet, Split, Task, TaskError
from areal_jax.types import Prompt


class Interleaving:
    """Assigns draws to sources: after any n draws, each source has more than w n - 1 and less than w n + 1 of them.

    w is the weight of the source by the sum of all. The j-th draw of a source, from 0, may have a number from
    floor(j / w) on and must have one below ceil((j + 1) / w); of the sources that may be next, the one with the
    earliest end is. With weights that sum to 1 this rule meets every end: S. Baruah, N. Cohen, C. Plaxton, D. Varvel,
    "Proportionate Progress: A Notion of Fairness in Resource Allocation", Algorithmica 15 (1996), for one processor.
    All numbers are exact.

    Args:
      weights: by source, above 0; the first of several sources with an equal end is next.
    """

    def __init__(self, weights: Mapping[str, float]):
        exact = {name: fractions.Fraction(repr(float(weight))) for name, weight in weights.items()}  # 0.1 is 1/10
        unit = math.lcm(*(weight.denominator for weight in exact.values()))
        self._parts = {name: int(weight * unit) for name, weight in exact.items()}
        self._whole = sum(self._parts.values())
        self.counts = dict.fromkeys(weights, 0)  # draws so far, by source
        self._drawn = 0

    def draw(self) -> str:
        """Returns the source of the next draw."""
        source = min(filter(self._may_be_next, self.counts), key=self._find_end)
        self.counts[source] += 1
        self._drawn += 1
        return source

    def restore(self, counts: Mapping[str, int]) -> None:
        """Continues after these draws."""
        self.counts = {source: int(counts[source]) for source in self.counts}
        self._drawn = sum(self.counts.values())

    def _may_be_next(self, source: str) -> bool:
        return self.counts[source] * self._whole // self._parts[source] <= self._drawn

    def _find_end(self, source: str) -> int:
        return -(-(self.counts[source] + 1) * self._whole // self._parts[source])


class MixtureStream:
    """The prompts of several streams, interleaved by weight and numbered anew; see PromptStream."""

    def __init__(self, streams: Mapping[str, PromptStream], weights: Mapping[str, float]):
        self._streams, self._weights = streams, dict(weights)
        self._order = Interleaving(weights)
        self._next = 0

    def draw(self) -> Prompt:
        """The next prompt; its `draw` is one more than the last."""
        source = self._order.draw()
        prompt = dataclasses.replace(self._streams[source].draw(), draw=self._next, source=source)
        self._next += 1
        return prompt

    def state(self) -> JsonObject:
        """The draws so far by source, with the state of each stream, and the weights that determine the order."""
        streams = {source: dict(stream.state()) for source, stream in self._streams.items()}
        return {'weights': self._weights, 'counts': dict(self._order.counts), 'streams': streams}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`; raises TaskError if it comes from another mixture."""
        saved = state.get('weights')
        if saved != self._weights:
            raise TaskError(
                f'the saved prompt stream has the sources and weights {saved}, this one {self._weights}: its next draw '
                'would be another prompt. Restore with the task.sources of the saved run'
            )
        self._order.restore(state['counts'])
        self._next = sum(self._order.counts.values())
        for source, stream in self._streams.items():
            stream.restore(state['streams'][source])


class Mixture:
    """Several tasks by source, each with a weight; see PromptSet."""

    def __init__(self, tasks: Mapping[str, Task], weights: Mapping[str, float]):
        self.name = '+'.join(tasks)
        self.tasks, self.weights = tasks, weights

    def sizes(self) -> dict[str, int]:
        """The number of problems of all sources: {'train', 'held_out', 'dropped'}."""
        of_each = [task.sizes() for task in self.tasks.values()]
        return {side: sum(sizes[side] for sizes in of_each) for side in of_each[0]}

    def prompts(
        self, split: Split, seed: int, part: Callable[[PromptStream], PromptStream] = lambda stream: stream
    ) -> MixtureStream:
        """An endless stream over one side of the split of all sources.

        Args:
          part: takes the prompts of one client from the stream of a source. A part of the whole stream would have
            other shares of the sources.

        Raises TaskError, naming the source, if a side is empty.
        """
        streams = {}
        for source, task in self.tasks.items():
            with naming_source(source):
                streams[source] = part(task.prompts(split, seed))
        return MixtureStream(streams, self.weights)

    def held_out(self, n: int, seed: int) -> list[Prompt]:
        """Distinct held-out problems, draw numbers 0, 1, ...: n of them by weight, or all if there are fewer.

        A source whose problems are all taken is left out of the rest.
        """
        left = {
            source: collections.deque(task.held_out(min(n, size), seed))
            for source, task in self.tasks.items()
            if (size := task.sizes()['held_out'])
        }
        found: list[Prompt] = []
        order = Interleaving({source: self.weights[source] for source in left})
        while left and len(found) < n:
            source = order.draw()
            found.append(dataclasses.replace(left[source].popleft(), draw=len(found), source=source))
            if not left[source]:
                del left[source]
                order = Interleaving({source: self.weights[source] for source in left}) if left else order
        return found


@contextlib.contextmanager
def naming_source(source: str) -> Iterator[None]:
    """Raises an error of a task or its data set from inside again, with its source; without a source as it is."""
    try:
        yield
    except (TaskError, HubError) as error:
        if not source:
            raise
        raise TaskError(f'task.sources.{source}: {error}') from (error.__cause__ or error)


def split_problems(problems: PromptSet) -> Mapping[str, Task]:
    """The tasks by `Prompt.source`: those of a mixture, or the only one under ''."""
    return problems.tasks if isinstance(problems, Mixture) else {'': cast(Task, problems)}


def final_answer(problems: PromptSet, prompt: Prompt, text: str) -> str:
    """The final answer of a text, as the task of the prompt reads it; see Task.final_answer."""
    return split_problems(problems)[prompt.source].final_answer(text)
