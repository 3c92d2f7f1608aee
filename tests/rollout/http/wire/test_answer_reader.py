"""From ids to text and calls: a mark that is a token counts only where it was sampled."""

import numpy as np
import pytest

from areal_jax.rollout.http.wire.answer_reader import (
    BEGIN_TOKEN,
    END_TOKEN,
    NOTATIONS,
    AnswerText,
    CallParser,
    CallReader,
    ParsedAnswer,
    Reading,
    WholeReader,
)
from areal_jax.rollout.http.wire.exchange import Finish, ToolCall
from areal_jax.text.decoding import TextDecoder, TokenBytes

LENGTH = Finish('length')
HERMES = NOTATIONS['hermes']
SPELLED = {256: HERMES.begin, 257: HERMES.end, 258: '<special>'}
MARKS = {256: BEGIN_TOKEN, 257: END_TOKEN}
BODY = b'{"name": "f", "arguments": {"a": "\xc3\xa9"}}'


# ids below 256 are bytes
TOKEN_BYTES = TokenBytes(lambda token: SPELLED[token].encode() if token in SPELLED else bytes([token]))


def read(ids, ends=(), *, finish=LENGTH, hidden=(), stop=(), only_first=False):
    """(text, [(calls' name, arguments, place)], broken, hidden), of ids that come in pieces."""
    text = AnswerText(TextDecoder(TOKEN_BYTES, hidden, marks=MARKS), stop)
    reader = CallReader(text, CallParser(HERMES, tuple(MARKS.values())), only_first, lambda: 'c')
    given, calls, broken, left_out = '', [], 0, 0
    parts = np.split(np.array(ids, np.int32), ends)
    for index, part in enumerate(parts):
        reading = reader.extend(part, finish if index == len(parts) - 1 else None)
        calls += [(call.name, call.arguments, len(given) + call.after) for call in reading.calls]
        given, broken, left_out = given + reading.text, broken + reading.unparsed, left_out + reading.hidden
    return given, calls, broken, left_out


CALL = [256, *BODY, 257]
FOUND = ('f', '{"a": "é"}')


@pytest.mark.parametrize('hidden', [(), (256, 257)])
def test_token_marks_are_marks_also_where_special_tokens_are_hidden(hidden):
    ids = [*'é '.encode(), *CALL, *b'<tool_call>{}', *CALL]
    expected = ('é<tool_call>{}', [(*FOUND, 1), (*FOUND, 14)], 0, 0)
    for ends in ([], range(1, len(ids)), [1, 5, 9], [len(ids) - 1]):
        assert read(ids, ends, hidden=hidden) == expected


def test_what_is_broken_is_spelled_out():
    assert read([256, *b'x', 257, 258, *b'<tool_call>'], hidden=(256, 257, 258)) == (
        '<tool_call>x</tool_call><tool_call>',
        [],
        1,
        0,
    )


def test_the_token_that_ends_an_answer_is_no_part_of_it_and_a_stop_string_ends_a_call_in_text():
    assert read([*CALL, 258], finish=Finish('stop', 258)) == ('', [(*FOUND, 0)], 0, 0)
    ids = [*b'ab', *CALL, *b'cd']
    assert read(ids, finish=Finish('stop', 'd'), stop=('d',)) == ('abc', [(*FOUND, 2)], 0, 0)


def test_an_eos_before_a_mark_is_spelled_out_as_it_is_elsewhere():
    text = TextDecoder(TOKEN_BYTES, ends={258}, marks=MARKS)
    expected = f'a<special>{BEGIN_TOKEN}<special>b{END_TOKEN}'
    assert text.extend([97, 258, 256, 258, 98, 257, 258], is_last=True) == expected


def test_calls_after_the_first_are_hidden_on_demand():
    assert read([*CALL, *b'\n', *CALL, *b'x'], only_first=True) == ('x', [(*FOUND, 0)], 0, 1)


def test_a_character_ends_at_a_mark():
    text = TextDecoder(TOKEN_BYTES, marks=MARKS)
    assert text.extend([*'é'.encode()[:1], 256, *'é'.encode()[1:]], is_last=True) == f'\ufffd{BEGIN_TOKEN}\ufffd'


@pytest.mark.parametrize('ends', [[], [1], [2, 2, 5]])
@pytest.mark.parametrize('only_first', [False, True])
def test_a_whole_answer_comes_with_its_end(ends, only_first):
    parse = lambda ids: ParsedAnswer(TOKEN_BYTES.decode(ids.tolist()), (('f', '{}'), ('g', '{}')), 'hm', 1)
    reader = WholeReader(parse, lambda ids, finish: ids[:-1], only_first, lambda: 'c')
    *before, last = np.split(np.frombuffer(b'I add.', np.uint8).astype(np.int32), ends)
    assert all(reader.extend(part) == Reading() for part in before)
    calls = tuple(ToolCall('c', name, '{}', 5) for name in ('f', 'g'))
    assert reader.extend(last, LENGTH) == Reading('I add', calls[: 2 - only_first], 1, int(only_first), 'hm')
