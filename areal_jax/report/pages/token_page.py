"""The page of `areal-rollouts --page`: kept answers whose tokens are coloured by a quantity that the reader chooses.

The page has one object of JSON, {'quantities', 'groups'}, which token_view.html draws. Every number in it is stored in
the rollouts of the run, or is the exponential of a difference of two stored log-probs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from areal_jax.files import JsonObject
from areal_jax.report.pages.blocks import Absent, Section, Text, TokenView
from areal_jax.report.pages.colors import BLUE, GREY, VERMILION, order_shades
from areal_jax.report.pages.web_page import render_web_page
from areal_jax.telemetry import rollout_views
from areal_jax.telemetry.rollout_views import GivenAnswer
from areal_jax.types import NOT_GENERATED

FILE = 'rollouts.html'
Numbers = list[float | None] | float | None  # by token; one number for all tokens; None = not stored
_MOST_KEYS = 12  # of a legend
_BOUNDS = (1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 4.0, 10.0)  # ends of the scale of a ratio
_WITHIN = 0.99  # share of the tokens whose ratio is between the ends
_CLIPPED = {  # by the mark in an answer's `clip`
    '+': ('clipped at the upper edge', VERMILION),
    '-': ('clipped at the lower edge', BLUE),
    'x': ('taken out by a gate, a mask or the veto', GREY),
    'o': ('not in the loss', ''),
    '.': ('not clipped', ''),
}


class Quantity(NamedTuple):
    """A quantity of the switch."""

    title: str
    meaning: str
    describe: Callable[[list[float | str]], JsonObject]  # its scale, from the values of all tokens


def render_token_page(name: str, groups: Sequence[JsonObject], left_out: int) -> str:
    """Returns the page of the groups of a run called `name`, of which `left_out` more are kept."""
    told = [_describe_group(group) for group in groups]
    answers = [answer for group in told for answer in group['answers']]
    bare = sum('tokens' not in answer for answer in answers)
    notes = [Absent(_describe_bare(bare, len(answers)))] if bare else []
    view = TokenView({'quantities': _describe_quantities(answers), 'groups': told})
    head = [Text(_describe_choice(groups, len(answers), left_out))]
    return render_web_page(f'Answers of {name}', head, [Section('answers', 'Answers', [*notes, view])])


def _describe_choice(groups: Sequence[JsonObject], answers: int, left_out: int) -> str:
    updates = [group['update'] for group in groups]
    of = f'updates {min(updates)} to {max(updates)}' if max(updates) else 'an evaluation'
    more = f' {left_out} more groups are kept: `--limit=0` shows all.' if left_out else ''
    return f'{len(groups)} groups of {of}, {answers} answers.{more} A click on a group opens it.'


def _describe_bare(bare: int, answers: int) -> str:
    return (
        f'{bare} of {answers} answers have no numbers by token and are shown as text: an evaluation keeps none, a '
        'group that is too long loses them, and earlier versions of this program did not store where a token begins.'
    )


def _describe_group(group: JsonObject) -> JsonObject:
    rewards = [answer['reward'] for answer in group['answers'] if answer['reward'] is not None]
    return {
        'update': group['update'],
        'draw': group['draw'],
        'trained': group['trained'],
        'rewards': rewards,
        'prompt': _describe_prompt(group['prompt']),
        'problem': {name: str(value) for name, value in (group.get('problem') or {}).items()},
        'answers': [_describe_answer(group, answer) for answer in group['answers']],
        **({'cut': group['cut']} if 'cut' in group else {}),
    }


def _describe_prompt(prompt: JsonObject) -> JsonObject:
    names = ('text', 'tokens', 'characters') if _has_pieces(prompt) else ('text',)
    return {name: prompt[name] for name in names}


def _has_pieces(texts: JsonObject) -> bool:
    return 'tokens' in texts and 'characters' in texts


def _describe_answer(group: JsonObject, answer: JsonObject) -> JsonObject:
    """The answer as the page has it; with 'tokens' only if it has numbers by token."""
    one = GivenAnswer(group, answer)
    found = {
        'name': rollout_views.name_of(answer),
        'sample': answer['sample'],
        'reward': answer['reward'],
        'label': answer['label'],
        'finish': answer['finish'],
        'length': one.length,
        'mean_advantage': one.advantage,
        'text': answer['text'],
        **({'prompt': _describe_prompt(answer['prompt'])} if 'prompt' in answer else {}),
    }
    if not _has_pieces(answer):
        return found
    numbers = {
        'version': _spread(answer, [version for _, version in answer.get('versions', ())]),
        'age': _spread(answer, answer.get('ages', ())),
        'policy_over_behavior': _divide(answer, 'policy_logprobs'),
        'proximal_over_behavior': _divide(answer, 'proximal_logprobs'),
        'clip': _mark_clips(answer),
        'advantage': _find_advantages(answer),
        'behavior_logprobs': answer.get('behavior_logprobs'),
        'policy_logprobs': _in_loss(answer, answer.get('policy_logprobs')),
        'proximal_logprobs': _in_loss(answer, answer.get('proximal_logprobs')),
        'policy_over_proximal': _in_loss(answer, answer.get('ratio')),
        'weight': _in_loss(answer, answer.get('weight')),
    }
    return {
        **found,
        'tokens': answer['tokens'],
        'characters': answer['characters'],
        'given': ''.join('1' if given else '0' for given in _find_given(answer)),
        'numbers': {name: values for name, values in numbers.items() if values is not None},
    }


def _find_given(answer: JsonObject) -> list[bool]:
    """Whether each token is not the policy's: of a tool, an environment, a user."""
    if 'versions' in answer:
        return [version == NOT_GENERATED for count, version in answer['versions'] for _ in range(count)]
    return [mark == ' ' for mark in answer.get('loss_mask', '1' * len(answer['tokens']))]


def _spread(answer: JsonObject, values: Iterable[float | None]) -> list[float | None] | None:
    """The value of each span at each of its tokens, None where nothing was generated; None without spans."""
    spans = zip(answer.get('versions', ()), values, strict=True)
    return [None if v == NOT_GENERATED else value for (count, v), value in spans for _ in range(count)] or None


def _in_loss(answer: JsonObject, values: Numbers) -> Numbers:
    """The values at the tokens in the loss, None at the others; without the mask there was no loss."""
    mask = answer.get('loss_mask')
    if mask is None or values is None:
        return None
    each = values if isinstance(values, list) else [values] * len(mask)
    return [value if mark == '1' else None for value, mark in zip(each, mask, strict=True)]


def _divide(answer: JsonObject, name: str) -> Numbers:
    """exp(log-probs `name` - behavior log-probs), with six digits; None if one of them is not stored."""
    above, below = answer.get(name), answer.get('behavior_logprobs')
    if above is None or below is None:
        return None
    pairs = zip(above, below, strict=True)
    return _in_loss(answer, [None if a is None or b is None else _round(math.exp(a - b)) for a, b in pairs])


def _round(value: float) -> float:
    return float(f'{value:.6g}')


def _find_advantages(answer: JsonObject) -> Numbers:
    """By token of the answer, or one number for all tokens that were trained."""
    stored = answer.get('advantage')
    if isinstance(stored, list):  # of the generated tokens
        each = iter(stored)
        stored = [None if given else next(each) for given in _find_given(answer)]
    return _in_loss(answer, stored)


def _mark_clips(answer: JsonObject) -> str | None:
    """A mark of _CLIPPED for each token, ' ' for one that is not generated; None if the loss has no clip."""
    if 'clip' not in answer:
        return None
    mask = answer['loss_mask']
    closed = answer.get('closed', ' ' * len(mask))
    marks = zip(answer['clip'], closed, mask, strict=True)
    return ''.join(' ' if m == ' ' else 'o' if m == '0' else 'x' if c == '1' else clip for clip, c, m in marks)


# The scales: which colour and which strength a value has, and the numbers of the legend.


def _order(values: list[float | str]) -> JsonObject:
    """A colour of viridis for each version or age."""
    known = sorted(set(map(int, values)))
    colors = dict(zip(known, order_shades(len(known)), strict=True))
    step = max(1, math.ceil(len(known) / _MOST_KEYS))
    keys = [*known[:-1:step], known[-1]]
    return {
        'scale': 'ordered',
        'colors': {str(value): color for value, color in colors.items()},
        'keys': [[str(value), colors[value], 1.0] for value in keys],
    }


def _diverge_ratio(values: list[float | str]) -> JsonObject:
    """Blue below 1, vermilion above, by the logarithm; the ends are the first of _BOUNDS that enclose most values."""
    distances = np.abs(np.log(np.maximum(np.array(values, np.float64), 1e-30)))
    far = math.exp(float(np.quantile(distances, _WITHIN)))
    bound = next((one for one in _BOUNDS if far <= one), _BOUNDS[-1])
    middle = math.sqrt(bound)
    keys = [
        [f'{1 / bound:.3g} or less', BLUE, 1.0], [f'{1 / middle:.3g}', BLUE, 0.5], ['1', GREY, 0.0],
        [f'{middle:.3g}', VERMILION, 0.5], [f'{bound:.3g} or more', VERMILION, 1.0],
    ]  # fmt: skip
    return {'scale': 'ratio', 'bound': bound, 'below': BLUE, 'above': VERMILION, 'keys': keys}


def _diverge(values: list[float | str]) -> JsonObject:
    """Blue below 0, vermilion above, up to the largest magnitude."""
    bound = max(abs(float(value)) for value in values) or 1.0
    keys = [
        [f'{-bound:.3g}', BLUE, 1.0], [f'{-bound / 2:.3g}', BLUE, 0.5], ['0', GREY, 0.0],
        [f'{bound / 2:.3g}', VERMILION, 0.5], [f'{bound:.3g}', VERMILION, 1.0],
    ]  # fmt: skip
    return {'scale': 'difference', 'bound': bound, 'below': BLUE, 'above': VERMILION, 'keys': keys}


def _categorize(values: list[float | str]) -> JsonObject:
    """A colour for each kind of clip, with the number of its tokens in the legend."""
    found = {mark: words for mark, words in _CLIPPED.items() if mark in values}
    return {
        'scale': 'marks',
        'colors': {mark: color for mark, (_, color) in found.items()},
        'names': {mark: name for mark, (name, _) in found.items()},
        'keys': [
            [f'{name}: {_count(values.count(mark))}', color or GREY, 1.0 if color else None if mark == 'o' else 0.0]
            for mark, (name, color) in found.items()
        ],
    }


def _count(tokens: int) -> str:
    return f'{tokens} token{"" if tokens == 1 else "s"}'


_QUANTITIES: Mapping[str, Quantity] = {
    'version': Quantity('Version', 'the policy version that sampled the token', _order),
    'age': Quantity(
        'Age', 'at training: versions between the one that sampled it and the one that was updated', _order
    ),
    'policy_over_behavior': Quantity(
        'Policy / behavior', 'importance ratio of the trained policy, at the last step on the token', _diverge_ratio
    ),
    'proximal_over_behavior': Quantity(
        'Proximal / behavior', 'importance ratio of the policy before the update', _diverge_ratio
    ),
    'clip': Quantity('Clip', 'what the loss did with the token', _categorize),
    'advantage': Quantity('Advantage', 'as the loss used it', _diverge),
}


def _describe_quantities(answers: Sequence[JsonObject]) -> list[JsonObject]:
    """The quantities that some token has, with their scales over all answers."""
    found = []
    for name, quantity in _QUANTITIES.items():
        values = [*itertools.chain.from_iterable(_list_values(answer, name) for answer in answers)]
        if values:
            scale = quantity.describe(values)
            found.append({'name': name, 'title': quantity.title, 'meaning': quantity.meaning, **scale})
    return found


def _list_values(answer: JsonObject, name: str) -> Iterator[float | str]:
    numbers = answer.get('numbers', {}).get(name, ())
    return (value for value in numbers if value is not None and value != ' ')
