"""What areal-score says of all scores at its end: counts by label and the mean reward."""

from __future__ import annotations

import collections
import dataclasses

from areal_jax.files import JsonObject


@dataclasses.dataclass
class ScoreTally:
    """Sums over the scores of a file, those of earlier calls included."""

    labels: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    failures: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # without a reward
    reward: float = 0.0  # sum

    def add(self, score: JsonObject) -> None:
        """A line of the file."""
        self.labels[score['label']] += 1
        if score['reward'] is None:
            self.failures[score['label']] += 1
        else:
            self.reward += score['reward']

    @property
    def answers(self) -> int:
        return self.labels.total()

    @property
    def mean_reward(self) -> float | None:
        """Over the answers that have a reward; None where no answer has."""
        scored = self.answers - self.failures.total()
        return self.reward / scored if scored else None

    def summarise(self, scored_before: int, seconds: float, out: str) -> JsonObject:
        """All numbers, as --json prints them."""
        return {
            'answers': self.answers,
            'scored_before': scored_before,
            'labels': dict(self.labels.most_common()),
            'failed': self.failures.total(),
            'mean_reward': self.mean_reward,
            'seconds': round(seconds, 3),
            'out': out,
        }


def render_summary(summary: JsonObject) -> str:
    """The numbers of `summarise` as a short table."""
    width = max(len(label) for label in ('label', *summary['labels']))
    rows = [f'{"label":{width}}  answers   share']
    for label, count in summary['labels'].items():
        rows.append(f'{label:{width}}  {count:7}  {count / summary["answers"]:5.1%}')
    mean = summary['mean_reward']
    shown = 'no answer has a reward' if mean is None else f'mean reward {mean:.4f}'
    if summary['failed'] and mean is not None:
        shown += f' of the {summary["answers"] - summary["failed"]} that have one'
    before = f', {summary["scored_before"]} of them before' if summary['scored_before'] else ''
    seconds = f'{summary["seconds"]:.1f} s'
    return '\n'.join([*rows, '', shown, f'{summary["answers"]} answers in {seconds}{before}', summary['out']])


def describe_failures(tally: ScoreTally, out: str) -> str:
    """The sentence for answers that have no reward, '' where all have one."""
    if not tally.failures:
        return ''
    found = ', '.join(f'{count} {label}' for label, count in tally.failures.most_common())
    return (
        f'{tally.failures.total()} of {tally.answers} answers have no reward ({found}): {out} has the reason of each; '
        'mend the scorer, or raise the limits task.verifier_*, and score them into another --out'
    )
