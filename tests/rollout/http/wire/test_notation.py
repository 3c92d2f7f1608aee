"""Calls in the text of an answer: nothing is lost, nothing is repaired, and it does not matter how the text comes."""

import itertools
import json

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from areal_jax.rollout.http.wire.answer_reader import (
    BEGIN_TOKEN,
    END_TOKEN,
    NOTATIONS,
    SPACE,
    CallParser,
    FoundCall,
    read_hermes,
)

HERMES = NOTATIONS['hermes']
TOKENS = (BEGIN_TOKEN, END_TOKEN)
WORDS = [
    HERMES.begin, HERMES.end, '{"name": "f", "arguments": ', '{"a": {"b": "}"}}', '}', '{', '"', '\\', '\\"', '\n', ' ',
    'text', '<', '<tool', '_call>', 'é', '{}', '"</tool_call>"', '{"name": "f", "arguments": {}}',
]  # fmt: skip
texts = st.text('ab"\\{}<>/\n é\u2028', max_size=6) | st.sampled_from([HERMES.begin, HERMES.end])
values = (
    st.none() | st.integers(-9, 9) | texts | st.lists(texts, max_size=2) | st.dictionaries(texts, texts, max_size=2)
)


def parse(pieces, tokens=()):
    """(parts with neighbouring texts joined, broken calls)."""
    parser, found = CallParser(HERMES, tokens), []
    for index, piece in enumerate(pieces):
        for part in parser.extend(piece, index == len(pieces) - 1):
            assert part
            if found and isinstance(part, str) and isinstance(found[-1], str):
                found[-1] += part
            else:
                found.append(part)
    return found, parser.unparsed


def spelled(text):
    return text.replace(BEGIN_TOKEN, HERMES.begin).replace(END_TOKEN, HERMES.end)


def cut(text, places):
    edges = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.sampled_from([*WORDS, *TOKENS]), max_size=14).map(''.join),
    st.lists(st.integers(0, 200), max_size=8),
    st.sampled_from([(), TOKENS, TOKENS[:1]]),
)
def test_parts_are_all_of_the_answer_however_it_is_cut(text, places, tokens):
    if set(text) & set(TOKENS) - set(tokens):
        text = spelled(text)
    found, broken = parse([text], tokens)
    assert (found, broken) == parse(cut(text, places), tokens) == parse([*text, ''], tokens)
    whole = ''.join(part if isinstance(part, str) else part.text for part in found)
    expected = spelled(text)
    assert whole == (expected.rstrip(SPACE) if found and isinstance(found[-1], FoundCall) else expected)
    for call in (part for part in found if isinstance(part, FoundCall)):
        assert isinstance(json.loads(call.arguments), dict)
        assert call.arguments in call.text


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(texts.filter(bool), st.dictionaries(texts, values, max_size=3)), min_size=1, max_size=3),
    st.booleans(),
)
def test_calls_that_are_written_are_found_with_any_strings_in_them(calls, ascii_only):
    arguments = [json.dumps(given, ensure_ascii=ascii_only) for _, given in calls]
    written_calls = [
        f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {written}}}</tool_call>'
        for (name, _), written in zip(calls, arguments, strict=True)
    ]
    found, broken = parse(['a ', '\n'.join(written_calls)])
    assert (found[0], broken) == ('a', 0)
    assert [(call.name, call.arguments) for call in found[1:]] == [
        (name, written) for (name, _), written in zip(calls, arguments, strict=True)
    ]


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(('text', 'calls', 'rest', 'broken'), [
    (f'{CALL}{CALL}', 2, '', 0),
    (f'a\n{CALL}\nb', 1, 'a\nb', 0),
    (f' {CALL} \n', 1, '', 0),
    (CALL[:-3], 0, CALL[:-3], 1),  # cut by the limit of tokens
    (CALL[:-12], 0, CALL[:-12], 1),  # no closing mark
    (f'<tool_call>{CALL}', 1, '<tool_call>', 1),
    (f'<tool_call>{{"x": "{CALL[:5]}', 0, f'<tool_call>{{"x": "{CALL[:5]}', 1),
    (f'<tool_call>{{bad}}</tool_call> {CALL}', 1, '<tool_call>{bad}</tool_call>', 1),
    (f'<tool_call>{{"unclosed {CALL}', 1, '<tool_call>{"unclosed', 1),  # white space before a call is its own
    ('</tool_call> <tool_call', 0, '</tool_call> <tool_call', 0),
    (f'<tool_call>{{"name": "f", "arguments": {{"a": "{HERMES.begin}{HERMES.end}"}}}}</tool_call>', 1, '', 0),
])  # fmt: skip
def test_what_is_text_and_what_is_a_call(text, calls, rest, broken):
    found, unparsed = parse([*text, ''])
    assert sum(isinstance(part, FoundCall) for part in found) == calls
    assert ''.join(part for part in found if isinstance(part, str)) == rest
    assert unparsed == broken


def test_a_mark_that_is_a_token_counts_only_where_it_was_sampled():
    spelled_out = CALL + BEGIN_TOKEN + '{"name": "f", "arguments": {"a": "</tool_call>"}}' + END_TOKEN
    found, broken = parse([spelled_out], TOKENS)
    assert (found[0], found[1].arguments, broken) == (CALL, '{"a": "</tool_call>"}', 0)
    in_string = BEGIN_TOKEN + '{"name": "f", "arguments": {"a": "' + END_TOKEN
    assert parse([in_string], TOKENS) == ([spelled(in_string)], 1)


@pytest.mark.parametrize('text', [
    '', '[]', '3', '{}', '{"name": "f"}', '{"name": "f", "arguments": "{}"}', '{"name": "", "arguments": {}}',
    '{"name": 3, "arguments": {}}', '{"name": "f", "arguments": {}} x', '{"name": "f", "arguments": {}, }',
    '{"name": "f", "name": "g", "arguments": {}}', '{"name": "f", "arguments": {"a": NaN}}', '{"arguments": {}}',
    '{"name": "f", "arguments": {"a": "\n"}}', "{'name': 'f', 'arguments': {}}", '{"name": "\\ud800", "arguments": {}}',
    '{"name": "f", "arguments": ' + '{"a":' * 100_000, '{"name": "f", "arguments": {"a": ' + '1' * 5000 + '}}',
])  # fmt: skip
def test_what_is_no_call_is_not_repaired(text):
    assert read_hermes(text) is None


def test_arguments_are_not_written_anew():
    written = '{"b" : 1.50,\n "a":"\\u00e9"}'
    assert read_hermes(f' {{"arguments":{written} , "name":"f", "id": 3}}\n') == ('f', written)


@pytest.mark.parametrize('text', [
    HERMES.begin * 5_000, '<tool_call>{"' * 5_000, '<tool_call>{"a\\"' * 5_000, '<' * 30_000,
    '<tool_call>{"' + 'a' * 200_000,
    '<tool_call>{"\\' * 5_000, '\n' * 30_000,
])  # fmt: skip
def test_hostile_answers_take_time_in_proportion(text):
    found, _ = parse([text])
    assert ''.join(found) == text
