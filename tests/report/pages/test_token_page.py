"""The page with coloured tokens: its numbers by hand, its scales, hostile texts, and answers without numbers."""

from __future__ import annotations

import json
import math
import re
import sys

import numpy as np

from areal_jax.report.pages.token_page import render_token_page
from areal_jax.telemetry.rollout_writer import describe_group, write_record
from areal_jax.types import NOT_GENERATED, TokenArrays, TrajectoryGroup
from tests.learning.examples import segment, trajectory

HOSTILE = '</script><!--<script>alert(1)&\u2028'


def read_view(page: str) -> dict:
    """The object of JSON in the page."""
    (text,) = re.findall(r'<script type="application/json" id="view">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def split(tokens: np.ndarray) -> list[str]:
    return [HOSTILE if token == 9 else f' {token}' for token in tokens.tolist()]


def make_record(**fields: object) -> dict:
    """Of update 8: three tokens of version 5, one of an environment, two of version 7; the first one is masked."""
    turns = [segment([3, 4, 4], 5, [-0.1, -0.2, -0.3]), segment([9], NOT_GENERATED), segment([5, 0], 7, [-0.5, -1.0])]
    group = TrajectoryGroup(6, (trajectory([1, 2], turns, draw=6, sample=3, reward=0.5),))
    arrays: TokenArrays = {
        'policy_logprobs': np.float32([-9, -0.1, -0.4, -0.5, -2.0]),
        'advantages': np.float32([2, 2, 2, -1, -1]),
        'loss_mask': np.array([False, True, True, True, True]),
        'proximal_logprobs': np.float32([0, -0.2, -0.3, -0.25, -1.0]),
        'ratio': np.float32([0, 1.1, 0.9, 0.8, 0.4]),
        'weight': np.float32([0, 1, 1, 1.28, 1]),
        'clip': np.int8([0, 1, 0, -1, 0]),
        'closed': np.array([False, False, False, False, True]),
    }
    return describe_group(8, group, [arrays], split) | fields


def require_near(found: list[float | None], expected: list[float | None]) -> None:
    """Null is nan."""
    np.testing.assert_allclose(np.array(found, np.float64), np.array(expected, np.float64), rtol=1e-5)


def test_the_numbers_of_each_token():
    (group,) = read_view(render_token_page('tiny', [make_record()], 0))['groups']
    (answer,) = group['answers']
    numbers = answer['numbers']
    assert numbers['version'] == [5, 5, 5, None, 7, 7]
    assert numbers['age'] == [2, 2, 2, None, 0, 0]  # 8 - 1 - version
    above = [None, math.exp(-0.1 + 0.2), math.exp(-0.4 + 0.3), None, 1.0, math.exp(-2.0 + 1.0)]
    require_near(numbers['policy_over_behavior'], above)
    require_near(numbers['proximal_over_behavior'], [None, 1, 1, None, math.exp(0.25), 1])
    assert numbers['clip'] == 'o+. -x'
    assert numbers['advantage'] == [None, 2, 2, None, -1, -1]
    require_near(numbers['behavior_logprobs'], [-0.1, -0.2, -0.3, None, -0.5, -1.0])
    require_near(numbers['policy_logprobs'], [None, -0.1, -0.4, None, -0.5, -2.0])
    assert answer['given'] == '000100'


def test_the_pieces_are_the_text_whatever_it_holds():
    page = render_token_page(f'<b>{HOSTILE}', [make_record()], 0)
    (group,) = read_view(page)['groups']
    (answer,) = group['answers']
    assert answer['text'] == f' 3 4 4{HOSTILE} 5 0'
    assert answer['characters'] == [2, 2, 2, len(HOSTILE), 2, 2]
    assert group['prompt'] == {'text': ' 1 2', 'tokens': [1, 2], 'characters': [2, 2]}
    assert page.count('</script>') == 3  # of the theme, the view and its drawing
    assert '<b>' not in page


def test_the_scales():
    quantities = {q['name']: q for q in read_view(render_token_page('tiny', [make_record()], 0))['quantities']}
    assert list(quantities) == ['version', 'age', 'policy_over_behavior', 'proximal_over_behavior', 'clip', 'advantage']
    assert [key[0] for key in quantities['version']['keys']] == ['5', '7']
    assert quantities['age']['colors'].keys() == {'0', '2'}
    assert len(set(quantities['age']['colors'].values())) == 2
    # |log ratio| of the four tokens: 0.1, 0.1, 0, 1, of which 99% are below exp(0.973) = 2.65
    assert quantities['policy_over_behavior']['bound'] == 4.0
    assert quantities['advantage']['bound'] == 2.0
    assert [key[0] for key in quantities['advantage']['keys']] == ['-2', '-1', '0', '1', '2']
    assert [key[0] for key in quantities['clip']['keys']] == [
        'clipped at the upper edge: 1 token', 'clipped at the lower edge: 1 token',
        'taken out by a gate, a mask or the veto: 1 token', 'not in the loss: 1 token', 'not clipped: 1 token',
    ]  # fmt: skip


def test_many_versions_have_a_legend_of_a_dozen():
    records = [make_record() for _ in range(40)]
    for shift, record in enumerate(records):
        record['answers'][0]['versions'] = [[3, shift], [1, NOT_GENERATED], [2, shift + 1]]
    (version, *_) = read_view(render_token_page('tiny', records, 0))['quantities']
    assert len(version['colors']) == 41
    keys = [int(key[0]) for key in version['keys']]
    assert keys == sorted(set(keys))
    assert (keys[0], keys[-1]) == (0, 40)
    assert len(keys) <= 13


def test_a_group_that_was_not_trained_has_versions_alone():
    turns = [segment([3, 4], 5, [-0.1, -0.2])]
    group = TrajectoryGroup(6, (trajectory([1], turns, draw=6, sample=0, reward=1.0),))
    view = read_view(render_token_page('tiny', [describe_group(8, group, [], split)], 0))
    assert [quantity['name'] for quantity in view['quantities']] == ['version', 'age']
    assert view['groups'][0]['trained'] is False


def test_answers_without_numbers_are_shown_as_text():
    cut = json.loads(write_record(make_record(), 700))
    evaluated = make_record()
    del evaluated['answers'][0]['characters']
    page = render_token_page('tiny', [cut, evaluated, make_record()], 7)
    groups = read_view(page)['groups']
    assert ['tokens' in group['answers'][0] for group in groups] == [False, False, True]
    assert groups[0]['cut'] == 'tokens'
    assert groups[0]['answers'][0]['text'] == make_record()['answers'][0]['text']
    assert '2 of 3 answers have no numbers by token' in page
    assert '7 more groups are kept' in page
    assert 'have no numbers by token' not in render_token_page('tiny', [make_record()], 0)


def test_the_page_asks_for_nothing_and_needs_no_plotting(monkeypatch):
    monkeypatch.setitem(sys.modules, 'bokeh', None)
    page = render_token_page('tiny', [make_record()], 0)
    assert "default-src 'none'" in page
    assert not re.search(r'(?:src|href)\s*=|url\(|@import|fetch\(|https?://', page)
