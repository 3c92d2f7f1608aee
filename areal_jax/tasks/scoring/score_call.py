"""One call of a scorer: its reward, or the reason why it gave no reward.

Inline scoring and worker processes call the same function, so both follow the same rules.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import SupportsFloat, cast

from areal_jax.errors import cut_text, name_type
from areal_jax.labels import SCORED

REWARD_LIMIT = 1e6  # largest absolute reward: far above any scale in use, and its square does not overflow
REASON_CHARACTERS = 2000  # of an exception's text, and of the reason of a score
_NO_NUMBERS = 'cmMSUO'  # kinds of numpy dtypes: complex, times, bytes, text, objects


class Score(float):
    """A reward with a label, which a scorer may return instead of a plain number (label 'ok').

    'unparsed': no answer could be read in the text. Such an answer is trained as reward 0, and counted separately from
    wrong ones. Raises ValueError for a label not in labels.SCORED, and for 'unparsed' with a reward other than 0.

    Args:
      reason: why the reward is not higher; cut to REASON_CHARACTERS after the scorer has returned.
      cpu_s, wall_s: seconds that a check of code took; 0 = not measured.
    """

    label: str
    reason: str
    cpu_s: float
    wall_s: float

    def __new__(
        cls, reward: float, label: str = 'ok', *, reason: str = '', cpu_s: float = 0.0, wall_s: float = 0.0
    ) -> Score:
        if label not in SCORED or (label == 'unparsed' and reward != 0):
            raise ValueError(f'a score of {reward} with the label {label!r}: labels are ok, and unparsed for reward 0')
        score = super().__new__(cls, reward)
        score.label, score.reason, score.cpu_s, score.wall_s = label, reason, cpu_s, wall_s
        return score


MEASURED = ('reason', 'cpu_s', 'wall_s')  # attributes of a Score in addition to its label
UNPARSED = Score(0.0, 'unparsed')


class MachineFaultError(Exception):
    """Raised by a scorer if the answer could not be judged, and another attempt may succeed."""


class ScoringError(Exception):
    """Raised if the scorer raised, or returned something that is not a reward; the message describes it."""


def score_answer(
    score: Callable[..., object], problem: object, text: str, finish_reason: object, episode: object = None
) -> Score:
    """The reward of one answer, with its label.

    `episode`: for a scorer with a parameter of that name (worker.takes_episode); None = no such parameter.
    Raises ScoringError if the scorer raises anything, SystemExit included, or if `to_reward` refuses its value.
    KeyboardInterrupt, which with inline scoring is the user's Ctrl-C, and MachineFaultError are raised again.
    """
    try:
        value = score(problem, text, finish_reason, **({} if episode is None else {'episode': episode}))
        reward = to_reward(value)
        return check_score(value, reward) if isinstance(value, Score) else Score(reward)
    except (KeyboardInterrupt, MachineFaultError):
        raise
    except BaseException as error:
        raise ScoringError(describe_error(error)) from error


def check_score(score: Score, reward: float) -> Score:
    """Copies a score for the log: the scorer can still change its attributes. Raises TypeError and ValueError."""
    seconds = {'cpu_s': float(score.cpu_s), 'wall_s': float(score.wall_s)}
    for name, value in seconds.items():
        if not 0 <= value < math.inf:
            raise ValueError(f'the scorer returned a score with {name}={value}: seconds are finite, and not negative')
    return Score(reward, score.label, reason=shorten_reason(str(score.reason)), **seconds)


def to_reward(value: object) -> float:
    """`value` as a float: bools, ints, floats and scalars of numpy, jax or torch.

    Raises TypeError for anything but one number (text like '1.0' is not one), ValueError for NaN, infinities and sizes
    above REWARD_LIMIT.
    """
    kind = type(value)
    is_number = hasattr(kind, '__float__') or hasattr(kind, '__index__')
    if isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real):
        is_number = False
    if getattr(getattr(value, 'dtype', None), 'kind', 'f') in _NO_NUMBERS or len(getattr(value, 'shape', ())):
        is_number = False
    if not is_number:
        raise TypeError(f'the scorer returned a {kind.__name__}, which is not a number')
    reward = float(cast(SupportsFloat, value))
    if not abs(reward) <= REWARD_LIMIT:
        raise ValueError(f'the scorer returned {reward}: a reward must be finite and at most {REWARD_LIMIT:g} in size')
    return reward


def describe_error(error: BaseException) -> str:
    """Type and text of an exception on one line, cut to a length that a log can hold; never raises."""
    name = make_printable(name_type(type(error)))
    try:
        # a copy: __str__ may give a text whose class has other methods
        return f'{name}: {shorten_reason(str.__str__(str(error)))}'
    except BaseException:  # its own __str__ is the scorer's code too
        return f'{name}, whose text cannot be read'


def shorten_reason(text: str) -> str:
    """A text from outside as one line that a log can hold."""
    return make_printable(cut_text(text, REASON_CHARACTERS))


def make_printable(text: str) -> str:
    """One line that every log and terminal can show: line ends and halves of surrogate pairs are spelled out."""
    return text if text.isprintable() else text.encode('unicode_escape').decode('ascii')
