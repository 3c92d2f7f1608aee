"""Routes as a run gets them: from servers of our own those of the engine in this process, from others what they say."""

from __future__ import annotations

import base64
import dataclasses
import io
import json

import numpy as np
import pytest

from areal_jax.lanes import server_lanes
from areal_jax.rollout.http.clients.own import OwnEngine
from areal_jax.rollout.http.clients.sglang import SglangDialect
from areal_jax.rollout.http.clients.vllm import OwnDialect, VllmDialect
from areal_jax.rollout.http.wire import reply
from areal_jax.rollout.servers.member import RequestFailedError
from areal_jax.types import Segment
from tests.rollout.engine_contract import LONGEST, Bench
from tests.rollout.engine_contract import PROMPT as ASKED
from tests.rollout.http.clients.fake_server import FakeSglang, FakeVllm, choose_experts
from tests.rollout.http.clients.test_engine import LIMITS as LIMITS_OF_OTHERS
from tests.rollout.http.clients.test_engine import PACE, Factory
from tests.rollout.http.expert_rig import (
    FORMS,
    LIMITS,
    NAME,
    NEW,
    PROMPT,
    ExpertServer,
    InProcess,
    drive,
    request,
    take,
)


@pytest.fixture(scope='module')
def server():
    with ExpertServer() as server:
        yield server


def whole(segments):
    """(tokens, context, column) of an answer, whose first segment alone has a context."""
    first, *others = segments
    assert all(segment.context == {} for segment in others)
    column = np.concatenate([segment.columns[NAME] for segment in segments])
    return [token for one in segments for token in one.tokens.tolist()], first.context.get(NAME), column


def test_segments_are_those_of_the_engine(server):
    tokens, context, column = whole(drive(InProcess(), lambda engine: take(engine.generate(request()))))
    with server.paced() as note_segment:
        segments = drive(server, lambda engine: take(engine.generate(request()), note_segment))
    assert len(segments) > 1  # they came as they grew
    found = whole(segments)
    assert found[0] == tokens
    assert (context.shape, column.shape) == ((len(PROMPT), 2, 3), (NEW, 2, 3))
    for mine, theirs in zip(found[1:], (context, column), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


def test_the_rest_of_an_answer_comes_without_the_prompt(server):
    tokens, _, column = whole(drive(InProcess(), lambda engine: take(engine.generate(request()))))
    begun = [Segment(np.array(tokens[:3], np.int32), np.zeros(3, np.float32), 0, {NAME: column[:3]})]
    segments = drive(server, lambda engine: take(engine.generate(request(prefix=begun))))
    rest, context, found = whole(segments)
    assert (rest, context) == (tokens[3:], None)
    np.testing.assert_array_equal(found, column[3:])


def npy(rows):
    file = io.BytesIO()
    np.save(file, rows)
    return base64.b64encode(file.getvalue()).decode()


class Scripted:
    """A connection that answers with one event, whose rows are given."""

    url = 'scripted'

    def __init__(self, rows):
        self.rows, self.sent = rows, []

    async def stream(self, path, body, take):
        self.sent.append(body)
        entry = {'token_id': 6, 'logprob': -1.0}
        choice = {
            'index': 0, 'finish_reason': 'length', 'token_ids': [6] * NEW, 'logprobs': {'content': [entry] * NEW},
            'weight_versions': [{'version': '0', 'start': 0, 'end': NEW}], 'routed_experts': self.rows,
        }  # fmt: skip
        take(f'data: {json.dumps({"choices": [choice]})}')

    async def require(self, method, path, body=None):
        class Reply:
            fields = staticmethod(lambda: reply.Reply({}))

        return Reply()

    async def close(self): ...


class ScriptedServer:
    def __init__(self, rows):
        self.connection = Scripted(rows)

    def client(self, clock, log):
        return OwnEngine(
            server_lanes(0), OwnDialect(), self.connection, clock, log,
            locate=lambda published: published.handle, limits=LIMITS, kv_policy='recompute',
        )  # fmt: skip


ROWS = np.tile(np.array([[0, 1, 2], [5, 4, 3]], np.uint8), (len(PROMPT) + NEW - 1, 1, 1))


def test_sound_rows_of_a_script_are_taken():
    server = ScriptedServer(npy(ROWS))
    (segment,) = drive(server, lambda engine: take(engine.generate(request())))
    np.testing.assert_array_equal(segment.columns[NAME], ROWS[:NEW])
    assert (segment.context[NAME][0] == 255).all()
    (sent,) = server.connection.sent
    assert sent['return_routed_experts'] is True
    assert 'routed_experts_prompt_start' not in sent['sampling_params']


def test_the_rest_of_an_answer_is_asked_for_without_rows_of_its_prompt():
    begun = [Segment(np.array([1, 2, 3], np.int32), np.zeros(3, np.float32), 0, {NAME: ROWS[:3]})]
    server = ScriptedServer(npy(ROWS[:NEW]))
    with pytest.raises(RequestFailedError, match=r'8 tokens under version .*, 5 were left'):  # the script says too much
        drive(server, lambda engine: take(engine.generate(request(prefix=begun))))
    (sent,) = server.connection.sent
    assert sent['sampling_params']['routed_experts_prompt_start'] == len(sent['token_ids']) - 1 == len(PROMPT) + 2


@pytest.mark.parametrize(
    ('rows', 'fault'),
    [
        (None, 'nothing in it: start the server'),
        ('?', 'no base64 but'),
        (npy(ROWS[1:]), '11 rows where 12 belong'),
        (npy(ROWS + np.uint8(3)), 'the expert 8 in row 0'),
        (npy(ROWS.astype(np.float32)), 'no .npy file of integers'),
    ],
)
def test_a_request_whose_rows_can_not_be_trusted_fails_by_name(rows, fault):
    with pytest.raises(RequestFailedError, match=f'engine/0: request 7/0/0: routed_experts in the choice .*{fault}'):
        drive(ScriptedServer(rows), lambda engine: take(engine.generate(request())))


OTHERS = {'vllm': (FakeVllm, VllmDialect()), 'sglang': (FakeSglang, SglangDialect(reads_routes=True))}
WITH_ROUTES = dataclasses.replace(LIMITS_OF_OTHERS, forms=FORMS)


@pytest.fixture(params=OTHERS)
def other(request, tmp_path):
    """(server of others that tells experts, factory of engines that ask for them)."""
    server, dialect = OTHERS[request.param]
    with server(token_s=0.01 * PACE) as server:
        server.gives_routes = True
        yield server, Factory(server, dialect, tmp_path, WITH_ROUTES, asks=True)


def expected(position, version):
    """[2, 3]: the layers with experts alone, of the token that the token at a position was drawn after."""
    return np.array(choose_experts(position - 1, version))[[0, 2]]


def test_answers_of_others_have_the_routes_of_the_passes_that_gave_their_tokens(other):
    """Also over an update, which ends the call: the rest comes from another one."""
    server, factory = other

    async def script(bench):
        (one,) = bench.collect(0)
        await bench.pass_time(0.045)
        await bench.load(1)
        await bench.end_of(one)
        return one

    one = Bench(factory).run(script)
    _, context, column = whole(one.segments)
    assert set(one.versions()) == {0, 1}
    wanted = [expected(len(ASKED) + place, version) for place, version in enumerate(one.versions())]
    np.testing.assert_array_equal(column, wanted)
    np.testing.assert_array_equal(context[1:], [expected(position, 0) for position in range(1, len(ASKED))])
    assert (column.dtype, len(column), len(context)) == (np.uint8, LONGEST, len(ASKED))
    asked = server.sent('/inference/v1/generate' if isinstance(server, FakeVllm) else '/generate')
    assert len(asked) > 2
    assert [body.get('return_routed_experts', False) for body in asked] == [False, *[True] * (len(asked) - 1)]
    assert not any(body['stream'] for body in asked)


def test_a_server_of_others_that_tells_nothing_fails_the_request_by_name(other):
    server, factory = other
    server.gives_routes = False

    async def script(bench):
        with pytest.raises(RequestFailedError, match=r'routed_experts in the .* has nothing in it: start the server'):
            await take(bench.engine.generate(request()))

    Bench(factory).run(script)
