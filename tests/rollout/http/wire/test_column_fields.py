"""Columns of tokens in the bodies of every dialect."""

import dataclasses
import json

import numpy as np
import pytest

from areal_jax import columns
from areal_jax.columns import Column, declare
from areal_jax.rollout.http.wire import chat, completions, sglang, vllm
from areal_jax.rollout.http.wire.exchange import Answer, Piece, ReplyError, ReplyInfo, RequestError, name_answers

PLACES = Column('places', 'int32', shape=(2,), fill=-7)


@pytest.fixture
def places(monkeypatch):
    monkeypatch.setattr(columns, 'DECLARED', dict(columns.DECLARED))  # forgotten after the test
    declare(PLACES)


BODIES = {
    vllm: {'token_ids': [1], 'sampling_params': {'logprobs': 0}, 'return_places': True},
    completions: {'prompt': [1], 'logprobs': 0, 'return_places': True},
    chat: {'input_ids': [1], 'logprobs': True, 'return_places': True},
    sglang: {'input_ids': [1], 'return_logprob': True, 'places_mode': 'selected'},
}


@pytest.mark.parametrize('dialect', BODIES, ids=lambda module: module.__name__.split('.')[-1])
def test_every_dialect_has_the_column_where_it_is_asked_for(places, dialect):
    call = name_answers(dialect.parse(BODIES[dialect]), 'r')
    pieces = [
        Piece(np.array([4, 5], np.int32), np.zeros(2, np.float32), '3', {'places': np.array([[1, 2], [3, 4]], 'i4')}),
        Piece(np.array([6], np.int32), np.zeros(1, np.float32), '4'),
    ]
    answer, field = Answer('r', np.ones(1, np.int32), 0, pieces), f'{"output_token_" * (dialect is sglang)}places'
    reply = json.loads(json.dumps(dialect.render(call, [answer], ReplyInfo('', 0))))
    where = reply['meta_info'] if dialect is sglang else reply['choices'][0]
    assert where[field] == [[1, 2], [3, 4], [-7, -7]]
    if dialect in (vllm, sglang):
        (back,) = dialect.parse_reply(reply, call)
        assert back.column(PLACES).tolist() == where[field]
        where[field][2] = [-7, 0.5]
        with pytest.raises(ReplyError, match=rf"{field} in the .* 'places' holds .*: give values of int32"):
            dialect.parse_reply(reply, call)


@pytest.mark.usefixtures('places')
def test_a_client_asks_for_what_a_server_reads():
    for dialect in (vllm, sglang):
        call = dialect.parse(BODIES[dialect])
        assert call.columns == ('places',)
        assert dialect.parse(json.loads(json.dumps(dialect.render_request(call)))).columns == ('places',)


@pytest.mark.parametrize('is_declared', [False, True])
def test_a_column_that_is_not_declared_or_not_published_is_no_field(monkeypatch, is_declared):
    if is_declared:
        monkeypatch.setattr(columns, 'DECLARED', dict(columns.DECLARED))
        declare(dataclasses.replace(PLACES, published=False))
    with pytest.raises(RequestError, match='return_places'):
        vllm.parse(BODIES[vllm])
