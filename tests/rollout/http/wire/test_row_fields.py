"""Columns of the model in the bodies of every dialect: written, read back, refused where they can not be trusted."""

import base64
import dataclasses
import io
import json

import numpy as np
import pytest

from areal_jax import columns
from areal_jax.columns import ROUTED_EXPERTS, Column
from areal_jax.rollout.http.wire import chat, completions, sglang, vllm
from areal_jax.rollout.http.wire.exchange import Answer, ColumnForm, Finish, Piece, ReplyError, ReplyInfo, RequestError
from areal_jax.rollout.http.wire.reply import find_rows
from tests.rollout.http.expert_rig import FORM, FORMS

NAME = ROUTED_EXPERTS.name
PROMPT = np.array([1, 2, 3], np.int32)
P, N = len(PROMPT), 3
WANTED = {
    vllm: {'token_ids': [1, 2, 3], 'sampling_params': {'logprobs': 0}, 'return_routed_experts': True},
    sglang: {'input_ids': [1, 2, 3], 'return_logprob': True, 'return_routed_experts': True},
}
READ = list(WANTED)
INFO = ReplyInfo('', 0)
name_of = lambda module: module.__name__.rpartition('.')[2]


def draw(n, seed=0):
    """[n, layers, choices]: distinct experts."""
    random = np.random.default_rng(seed)
    shuffled = random.permuted(np.tile(np.arange(FORM.experts, dtype=np.uint8), (n, FORM.row[0], 1)), axis=-1)
    return shuffled[..., : FORM.row[1]]


ROWS = draw(P + N - 1)


def pieces(rows=ROWS):
    """Three tokens of two versions, as an engine records them."""
    context = np.concatenate([FORM.column.blank(1), rows[: P - 1]])
    piece = lambda tokens, version, own, context: Piece(
        np.array(tokens, np.int32), np.full(len(tokens), -0.5, np.float32), version, {NAME: own}, context=context
    )
    return [piece([4, 5], '3', rows[P - 1 : P + 1], {NAME: context}), piece([6], '4', rows[P + 1 :], {})]


def call_of(dialect, **fields):
    return dataclasses.replace(dialect.parse(WANTED[dialect] | fields), request_ids=('r',), forms=FORMS)


def render(dialect, call, rows=ROWS):
    answer = Answer('r', PROMPT, 0, pieces(rows), Finish('length'), '4')
    return json.loads(json.dumps(dialect.render(call, [answer], INFO)))


def holder(dialect, reply):
    """The object with the field."""
    return reply['meta_info'] if dialect is sglang else reply['choices'][0]


def npy(rows):
    file = io.BytesIO()
    np.save(file, rows)
    return encode(file.getvalue())


def encode(data):
    return base64.b64encode(data).decode()


def raw(rows):
    return encode(rows.astype('<i4').tobytes())


WRITE = {vllm: npy, sglang: raw}


def parse(dialect, text, call=None):
    call = call_of(dialect) if call is None else call
    reply = render(dialect, call)
    holder(dialect, reply)[NAME] = text
    (answer,) = dialect.parse_reply(reply, call)
    return answer


@pytest.mark.parametrize('dialect', READ, ids=name_of)
def test_the_client_reads_what_the_server_writes(dialect):
    call = call_of(dialect)
    (back,) = dialect.parse_reply(render(dialect, call), call)
    first, last = back.pieces
    assert (first.version, last.version) == ('3', '4')
    for found, piece in zip(back.pieces, pieces(), strict=True):
        assert found.columns[NAME].dtype == np.uint8
        np.testing.assert_array_equal(found.columns[NAME], piece.columns[NAME])
    np.testing.assert_array_equal(first.context[NAME], pieces()[0].context[NAME])
    assert last.context == {}


def test_the_events_of_vllm_are_read_one_by_one():
    call = call_of(vllm, stream=True)
    growing, so_far, found = Answer('r', PROMPT), 0, []
    for piece in pieces():
        growing.pieces.append(piece)
        growing.finish = Finish('length') if piece.version == '4' else None
        event = json.loads(vllm.render_event(call, growing, piece, INFO).removeprefix(b'data: '))
        (delta,) = vllm.parse_event(event, call, [so_far])
        so_far += len(piece.tokens)
        found += delta.pieces
    np.testing.assert_array_equal(find_rows(found, NAME), ROWS)
    assert [NAME in piece.context for piece in found] == [True, False]


def test_an_event_without_tokens_has_no_rows():
    call, growing = call_of(vllm, stream=True), Answer('r', PROMPT, pieces=pieces(), finish=Finish('abort'))
    nothing = Piece(np.zeros(0, np.int32), np.zeros(0, np.float32), '')
    event = json.loads(vllm.render_event(call, growing, nothing, INFO).removeprefix(b'data: '))
    assert event['choices'][0][NAME] is None
    assert vllm.parse_event(event, call, [3])[0].pieces == ()


@pytest.mark.parametrize('dialect', READ, ids=name_of)
def test_the_rest_of_an_answer_has_no_rows_of_the_prompt(dialect):
    call = dataclasses.replace(call_of(dialect), first_row=P - 1)
    (back,) = dialect.parse_reply(render(dialect, call), call)
    np.testing.assert_array_equal(np.concatenate([piece.columns[NAME] for piece in back.pieces]), ROWS[P - 1 :])
    assert all(piece.context == {} for piece in back.pieces)


@pytest.mark.parametrize('dialect', READ, ids=name_of)
def test_the_server_reads_what_the_client_asks_for(dialect):
    for start in (0, 2):
        call = dataclasses.replace(call_of(dialect), first_row=start)
        back = dialect.parse(json.loads(json.dumps(dialect.render_request(call))))
        assert (back.columns, back.first_row) == ((NAME,), start)
    plain = dataclasses.replace(call, columns=(), first_row=0)
    assert 'routed' not in json.dumps(dialect.render_request(plain))


@pytest.mark.parametrize('dialect', READ, ids=name_of)
def test_a_prompt_whose_routes_are_not_known_is_read_as_such(dialect):
    rows = ROWS.copy()
    rows[1] = 255
    call = call_of(dialect)
    (back,) = dialect.parse_reply(render(dialect, call, rows), call)
    np.testing.assert_array_equal(find_rows(back.pieces, NAME), rows)


def test_integers_of_older_servers_are_read():
    np.testing.assert_array_equal(find_rows(parse(vllm, npy(ROWS.astype(np.int16))).pieces, NAME), ROWS)
    fortran = np.asfortranarray(ROWS)
    np.testing.assert_array_equal(find_rows(parse(vllm, npy(fortran)).pieces, NAME), ROWS)


def test_servers_that_have_rows_for_all_layers_are_read():
    every = np.full((P + N - 1, FORM.n_layers, FORM.row[1]), -1)
    every[:, list(FORM.layers)] = ROWS
    np.testing.assert_array_equal(find_rows(parse(sglang, raw(every)).pieces, NAME), ROWS)


def changed(place, value):
    rows = ROWS.astype(np.int64)
    rows[place] = value
    return rows.astype(np.uint8)


@pytest.mark.parametrize('dialect', READ, ids=name_of)
@pytest.mark.parametrize(
    ('rows', 'fault'),
    [
        (ROWS[:-1], r'4 rows where 5 belong|[0-9]+ bytes, and 5 rows'),
        (np.concatenate([ROWS, ROWS[:1]]), '6 rows where 5 belong|[0-9]+ bytes, and 5 rows'),
        (ROWS[:0], '0 rows where 5 belong|[0-9]+ bytes, and 5 rows'),
        (ROWS[..., :2], r'the shape \(5, 2, 2\)|[0-9]+ bytes, and 5 rows'),
        (ROWS[:, :1], r'the shape \(5, 1, 3\)|[0-9]+ bytes, and 5 rows'),
        (ROWS.reshape(5, 6), r'the shape \(5, 6\)'),
        (changed((0, 0, 0), 8), 'the expert 8 in row 0, which is none from 0 to 7'),
        (changed((4, 1, 2), 255), 'the expert 255 in row 4, which is none'),
        (changed(4, 255), 'the expert 255 in row 4, which is none'),
        (changed((3, 1), 4), r'an expert twice in row 3: \[4, 4, 4\]'),
    ],
)
def test_rows_that_can_not_be_trusted_are_refused(dialect, rows, fault):
    if dialect is sglang and rows.ndim == 2:
        return  # the bytes are the same
    with pytest.raises(ReplyError, match=rf'^routed_experts in the .* of the server has ({fault})'):
        parse(dialect, WRITE[dialect](rows))


@pytest.mark.parametrize('dialect', READ, ids=name_of)
def test_a_server_that_records_none_is_said_to(dialect):
    with pytest.raises(ReplyError, match=r'^routed_experts in .* has nothing in it: start the server with rollout'):
        parse(dialect, None)


@pytest.mark.parametrize('dialect', READ, ids=name_of)
@pytest.mark.parametrize('text', [5, [1], 'no base64', 'AAA', 'ü'], ids=str)
def test_what_is_no_base64_is_refused(dialect, text):
    with pytest.raises(ReplyError, match=r'^routed_experts in the .* of the server has no base64 but '):
        parse(dialect, text)


def header(text, version=(1, 0)):
    content = text.encode() + b'\n'
    return b'\x93NUMPY' + bytes(version) + len(content).to_bytes(2, 'little') + content


@pytest.mark.parametrize(
    'data',
    [
        b'',
        b'no npy at all',
        header("{'descr': '|u1', 'fortran_order': False, 'shape': (5, 2, 3), }"),  # and no values
        header("{'descr': '|u1', 'fortran_order': False, 'shape': (5, 2, 3), }") + bytes(31),
        header("{'descr': '|u1', 'fortran_order': False, 'shape': (9999999999, 2, 3), }") + bytes(30),
        header("{'descr': '|O', 'fortran_order': False, 'shape': (5, 2, 3), }") + bytes(240),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (5, 2, 3), }") + bytes(120),
        header("{'descr': '|u1', 'shape': (5, 2, 3), }") + bytes(30),
        header("{'descr': '|u1', 'fortran_order': False, 'shape': (5, 2, 3), }", (3, 0)) + bytes(30),
        header("__import__('os')"),
        header('('),
        header("'''"),
    ],
)
def test_what_is_no_npy_file_of_integers_is_refused(data):
    with pytest.raises(ReplyError, match=r'^routed_experts in the choices\[0\] of the server has no \.npy file'):
        parse(vllm, encode(data))


@pytest.mark.parametrize('dtype', ['uint16', 'int8', 'int32', 'int64'])
def test_another_dtype_is_refused(dtype):
    with pytest.raises(ReplyError, match=f'has the dtype {dtype}, and rows of this model are uint8'):
        parse(vllm, npy(ROWS.astype(dtype)))


def test_another_dtype_of_sglang_is_refused():
    call = call_of(sglang)
    reply = render(sglang, call)
    reply['meta_info']['routed_experts_dtype'] = 'uint8'
    with pytest.raises(ReplyError, match=r"routed_experts in the meta_info .* the dtype 'uint8': have the server send"):
        sglang.parse_reply(reply, call)


@pytest.mark.parametrize(
    ('dialect', 'body'),
    [
        (completions, {'prompt': [1, 2, 3], 'return_routed_experts': True}),
        (chat, {'input_ids': [1, 2, 3], 'return_routed_experts': True, 'return_meta_info': True}),
    ],
    ids=['completions', 'chat'],
)
def test_choices_of_openai_have_the_rows_too(dialect, body):
    call = dataclasses.replace(dialect.parse(body), request_ids=('r',))
    (choice,) = render(dialect, call)['choices']
    assert choice[NAME] == npy(ROWS)
    if call.return_meta_info:
        assert choice['meta_info'][NAME] == raw(ROWS)


@pytest.mark.parametrize('dialect', READ, ids=name_of)
def test_a_call_that_generates_nothing_is_refused(dialect):
    if dialect is vllm:
        body, limit = {'sampling_params': {'max_tokens': 0, 'prompt_logprobs': 0}}, 'sampling_params.max_tokens'
    else:
        body = {'sampling_params': {'max_new_tokens': 0}, 'logprob_start_len': 0}
        limit = 'sampling_params.max_new_tokens'
    with pytest.raises(RequestError, match=rf'^return_routed_experts=True is not served with {limit}=0: '):
        dialect.parse(WANTED[dialect] | body)


@pytest.fixture
def another(monkeypatch):
    """A column that another model tells, of [layers] a token, and what is known of it."""
    monkeypatch.setattr(columns, 'DECLARED', dict(columns.DECLARED))
    column = columns.declare(Column('depths', 'uint16', None, fill=65535, packed=False))
    return ColumnForm(column.of_model('uint16', (4,)))


@pytest.mark.parametrize('dialect', [vllm, sglang], ids=name_of)
def test_whatever_a_model_tells_goes_over_the_wire(another, dialect):
    depths = np.arange(4 * (P + N - 1), dtype=np.uint16).reshape(-1, 4)
    depths[1] = 65535  # of the prompt, not known
    call = dataclasses.replace(call_of(dialect, return_depths=True), forms={**FORMS, 'depths': another})
    assert call.model_columns == (NAME, 'depths')
    assert json.loads(json.dumps(dialect.render_request(call)))['return_depths'] is True
    made, place = [], P - 1
    for piece in pieces():
        own = {'depths': depths[place : place + len(piece.tokens)]}
        context = {'depths': np.concatenate([another.column.blank(1), depths[: P - 1]])} if piece.context else {}
        made.append(dataclasses.replace(piece, columns=piece.columns | own, context=piece.context | context))
        place += len(piece.tokens)
    answer = Answer('r', PROMPT, 0, made, Finish('length'), '4')
    reply = json.loads(json.dumps(dialect.render(call, [answer], INFO)))
    (back,) = dialect.parse_reply(reply, call)
    found = find_rows(back.pieces, 'depths')
    assert found.dtype == np.uint16
    np.testing.assert_array_equal(found, depths)
    np.testing.assert_array_equal(find_rows(back.pieces, NAME), ROWS)
    holder(dialect, reply)['depths'] = WRITE[dialect](depths[1:])
    with pytest.raises(ReplyError, match=r'^depths in the .* of the server has (4 rows where 5|64 bytes, and 5 rows)'):
        dialect.parse_reply(reply, call)
