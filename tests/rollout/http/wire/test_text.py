"""The text of an answer that comes in pieces is that of the whole, without its stop."""

import numpy as np
import pytest

from areal_jax.rollout.http.wire.answer_reader import AnswerText, cut_stop
from areal_jax.rollout.http.wire.exchange import Finish
from areal_jax.text.decoding import TextDecoder, TokenBytes
from tests.rollout.http.wire.calls import decode_bytes

LENGTH = Finish('length')
BYTES = TokenBytes(lambda token: bytes([token]))


def tokens(text):
    return np.frombuffer(text if isinstance(text, bytes) else text.encode(), np.uint8).astype(np.int32)


class BytesRead(TokenBytes):
    """Counts the tokens that it spells."""

    def __init__(self):
        super().__init__(lambda token: bytes([token]))
        self.n_read, spell = 0, self.behind

        def count(token):
            self.n_read += 1
            return spell(token)

        self.behind = self.first = count


def in_pieces(found, ends, finish, **options):
    """Texts of the pieces of `found` that end at `ends`."""
    text = AnswerText(TextDecoder(BYTES), **options)
    parts = np.split(found, ends)
    return [text.extend(part) for part in parts[:-1]] + [text.extend(parts[-1], finish)]


def test_a_character_comes_whole_with_the_piece_that_completes_it():
    found = tokens('aé€🙂')
    assert in_pieces(found, range(1, len(found)), LENGTH) == ['a', '', 'é', '', '', '€', '', '', '', '🙂']


def test_what_is_never_completed_comes_at_the_end():
    assert in_pieces(tokens(b'a\xf0\x9f'), [2], LENGTH) == ['a', '\ufffd']
    assert in_pieces(tokens(b'a\xf0\x9f'), [2, 3], LENGTH) == ['a', '', '\ufffd']


@pytest.mark.parametrize('seed', range(8))
def test_pieces_add_up_to_the_whole(seed):
    random = np.random.default_rng(seed)
    alphabet = ['a', 'é', '€', '🙂', b'\xff', b'\xe2\x82', b'\x80', '\n']
    chosen = [alphabet[i] for i in random.integers(0, len(alphabet), 300)]
    found = tokens(b''.join(part if isinstance(part, bytes) else part.encode() for part in chosen))
    ends = np.sort(random.integers(0, len(found), 120))
    assert ''.join(in_pieces(found, ends, LENGTH)) == decode_bytes(found)


def test_the_work_does_not_grow_with_the_answer():
    content = BytesRead()
    text = AnswerText(TextDecoder(content))
    for _ in range(200):
        text.extend(tokens('eight by'))
    assert content.n_read == 200 * 8


def test_a_stop_string_is_cut_and_its_beginning_is_never_given():
    found, end = tokens('one END'), Finish('stop', 'END')
    given = in_pieces(found, range(1, len(found)), end, stop_strings=['END'])
    assert given == ['o', 'n', 'e', ' ', '', '', '']
    assert ''.join(in_pieces(found, [3], end, stop_strings=['END'], keep_stop=True)) == 'one END'


def test_the_end_may_come_alone():
    for ends in ([7], [3, 7, 7], [6, 7]):
        given = in_pieces(tokens('one END'), ends, Finish('stop', 'END'), stop_strings=['END', 'E', 'x'])
        assert ''.join(given) == 'one '
    assert ''.join(in_pieces(tokens('one END'), [7], LENGTH, stop_strings=['END'])) == 'one END'


def test_a_false_beginning_is_given_once_it_is_clear():
    assert in_pieces(tokens('xENx'), [1, 2, 3], LENGTH, stop_strings=['END']) == ['x', '', '', 'ENx']
    assert in_pieces(tokens('EEN'), [1, 2], LENGTH, stop_strings=['END']) == ['', 'E', 'EN']


def test_only_the_stop_that_ended_the_answer_is_cut():
    """One that came before a least length does not count."""
    assert ''.join(in_pieces(tokens('aENDbEND'), [], Finish('stop', 'END'), stop_strings=['END'])) == 'aENDb'


def test_a_stop_string_inside_its_token_ends_the_text_there():
    words = TokenBytes({1: b'x', 2: b'a;b;'}.get)
    found, end = np.array([1, 2], np.int32), Finish('stop', ';')
    assert AnswerText(TextDecoder(words), [';']).extend(found, end) == 'xa'
    assert AnswerText(TextDecoder(words), [';'], keep_stop=True).extend(found, end) == 'xa;'


def test_the_text_of_a_stop_token_is_cut():
    found = tokens('ab.')
    assert ''.join(in_pieces(found, [1], Finish('stop', ord('.')))) == 'ab'
    assert ''.join(in_pieces(found, [1], Finish('stop', ord('.')), keep_stop=True)) == 'ab.'
    assert AnswerText(TextDecoder(BYTES)).extend(tokens(''), LENGTH) == ''


@pytest.mark.parametrize(('text', 'matched', 'kept', 'with_stop'), [
    ('abc.', ord('.'), 'abc', 'abc.'), ('abc', None, 'abc', 'abc'),
    ('a stop, no stop', 'stop', 'a stop, no ', 'a stop, no stop'), ('stop', 'stop', '', 'stop'),
    ('aé€', '€', 'aé', 'aé€'), ('abc', 'd', 'abc', 'abc'),
])  # fmt: skip
def test_the_ids_of_a_whole_answer_are_cut_where_its_text_is(text, matched, kept, with_stop):
    for keep_stop, expected in ((False, kept), (True, with_stop)):
        found = cut_stop(tokens(text), Finish('stop', matched), keep_stop, BYTES, tokens)
        assert (decode_bytes(found), found.dtype) == (expected, np.int32)


def test_the_text_around_a_stop_string_inside_of_a_token_is_cut_too():
    words = ['I ', 'add. Bye', '!']
    found = TokenBytes(lambda i: (words[i] if i < 3 else chr(i)).encode())
    for keep_stop, expected in ((False, 'I add'), (True, 'I add. ')):
        ids = cut_stop(np.array([0, 1], np.int32), Finish('stop', '. '), keep_stop, found, tokens)
        assert found.decode(ids.tolist()) == expected


def test_half_a_character_before_a_stop_string_is_not_encoded_anew():
    parts = [b'\xc3', b'\xa9.', b'x']
    found = TokenBytes(lambda i: parts[i] if i < 3 else bytes([i]))
    ids = cut_stop(np.array([2, 0, 1], np.int32), Finish('stop', '.'), False, found, tokens)
    assert found.decode(ids.tolist()) == 'xé'
