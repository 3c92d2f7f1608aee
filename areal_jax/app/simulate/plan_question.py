"""The answers that a plan is for: from a distribution, or from the log of a run."""

from __future__ import annotations

import pathlib

from areal_jax.config.ranges import ConfigError
from areal_jax.errors import UserError
from areal_jax.events.schema import FILE as EVENTS
from areal_jax.files import read_json
from areal_jax.report.event_log import load_events
from areal_jax.simulation.drawn_answers import read_groups
from areal_jax.simulation.planner.neighbours import Answers
from areal_jax.simulation.planner.question import describe_lengths, describe_log, require_batch

GROUP_SIZE = 16
_CONFIG = 'config.json'


def read_answers(lengths: str, count: int, group_size: int | None, limit: int, prompt: int) -> Answers:
    """`lengths` is a distribution, or the workdir of a run.

    Args:
      group_size: None = GROUP_SIZE, or that of the run.
      limit: rollout.max_new_tokens; 0 = that of the run, or a few mean lengths.

    Raises ConfigError for a text that is neither, for a run of too few answers or of other groups, and UserError for a
    log that does not say how long answers were.
    """
    if '(' in lengths:
        return describe_lengths(lengths, count, group_size or GROUP_SIZE, limit, prompt)
    run = pathlib.Path(lengths)
    if not (run / EVENTS).is_file():
        raise ConfigError(
            f"--lengths={lengths!r} is no distribution, such as 'lognormal(9000, 0.75)', and there is no {run / EVENTS}"
        )
    try:
        groups = read_groups(load_events(run / EVENTS), run, 1)
    except (KeyError, TypeError) as error:
        raise UserError(
            f'{run / EVENTS} does not say lengths and rewards of answers ({error}): name a run of this program'
        ) from error
    size = len(groups[0])
    if group_size not in (None, size):
        raise ConfigError(f'--group_size={group_size}: {run} has groups of {size}; leave it out')
    require_batch(count, size)
    if len(groups) < count // size:
        raise ConfigError(
            f'--lengths={run} has {len(groups)} whole groups of {size} answers, and --answers={count} needs '
            f'{count // size}: name a longer run or a smaller batch'
        )
    if any(len(answer.turns) > 1 for group in groups for answer in group):
        raise ConfigError(f'--lengths={run} is a run of agents, which are not planned: simulate it, docs/simulation.md')
    answers = [[(answer.length, answer.reward) for answer in group] for group in groups]
    return describe_log(f'log({run})', answers, count, limit or _read_limit(run), prompt)


def _read_limit(run: pathlib.Path) -> int:
    """rollout.max_new_tokens of a run."""
    try:
        return int(read_json(run / _CONFIG)['rollout']['max_new_tokens'])  # type: ignore[index, call-overload]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f'{run / _CONFIG} does not say rollout.max_new_tokens ({error}): give --max_new_tokens'
        ) from error
