"""Columns of tokens: what a declaration must say, and one column that a test adds, from the engine to the loss."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib

import numpy as np
import pytest

import areal_jax
from areal_jax import columns
from areal_jax.checkpoint.store import decode_run_state, encode_run_state
from areal_jax.columns import ROUTED_EXPERTS, SAMPLING_LOGPROBS, Column, ColumnError, declare
from areal_jax.control.episode import Row
from areal_jax.distributed.messages import decode, encode
from areal_jax.learning.learner import SpmdLearner
from areal_jax.learning.objective.objectives import Likelihood
from areal_jax.learning.packing import empty_batch
from areal_jax.learning.passes import training_rows
from areal_jax.learning.row_layout import RowLayout
from areal_jax.rollout.http.clients.own import OwnEngine
from areal_jax.rollout.http.wire import vllm
from areal_jax.rollout.http.wire.exchange import Answer, Piece, ReplyInfo, name_answers
from areal_jax.sharding.rules import make_mesh
from areal_jax.types import GenerationRequest, SamplingParams, Segment
from tests import toys
from tests.changed_json import changed
from tests.learning.examples import learner_settings, make_optimizer, segment, tiny_decoder, trajectory
from tests.rollout.engine_contract import LONGEST, PROMPT, Bench
from tests.rollout.http.clients.test_own import Factory
from tests.rollout.http.server.rig import SlowBackend, ToyServer
from tests.rollout.servers.rig import ServerRig, request
from tests.rollout.servers.toy_server import RemoteGeneration

PLACES = Column('places', 'int32', shape=(2,), fill=-7)  # of a token: 100 draw + sample, position in the sequence


@pytest.fixture
def table(monkeypatch):
    """What is declared in a test is forgotten after it."""
    monkeypatch.setattr(columns, 'DECLARED', dict(columns.DECLARED))


@pytest.fixture
def places(table):
    declare(PLACES)


def places_of(request, start, n):
    """int32 [n, 2] of the tokens from position `start` on."""
    return np.array([[100 * request.draw + request.sample, start + i] for i in range(n)], np.int32).reshape(n, 2)


class PlacesBackend(toys.ToyBackend):
    """The toy backend, which also says of each token where it is."""

    def generate(self, weights, state, rows, steps):
        state, output = super().generate(weights, state, rows, steps)
        known = np.stack([places_of(row.request, row.position + 1, steps) for row in rows], axis=1)
        return state, dataclasses.replace(output, columns={**output.columns, 'places': known})


class SlowPlacesBackend(PlacesBackend, SlowBackend):
    """The same behind HTTP."""


def check_places(one):
    """Asserts that every token of a trajectory has its own entry, and the prompt the fill value."""
    prompt, length = len(one.prompt.tokens), len(one.tokens)
    found = one.column(PLACES)
    assert (found[:prompt] == -7).all()
    np.testing.assert_array_equal(found[prompt:], places_of(one_request(one), prompt, length - prompt))


def one_request(one):
    return GenerationRequest(one.prompt.draw, one.sample, 0, one.prompt.tokens, SamplingParams(1, 1.0, 0, 1.0, ()))


class SpmdToyLearner(toys.ToyLearner):
    """The toy learner, which also trains a small decoder; `groups` are all that it was given."""

    def __init__(self, w=0):
        super().__init__(w)
        decoder = tiny_decoder(n_layers=1)
        self.inner = SpmdLearner(
            decoder, decoder.init(seed=0), make_mesh(), optimizer=make_optimizer('sgd'), learning_rate=0.1,
            settings=learner_settings(
                row_tokens=40, row_loss_tokens=24, n_minibatches=2, truncated_sampling='full_softmax',
                filter_equal_rewards=False,
            ),
        )  # fmt: skip
        self.groups = []

    def update(self, groups, version):
        groups = decode(encode(list(groups)))  # as another process of the learner gets them
        self.groups += groups
        self.inner.update(groups, version)
        return super().update(groups, version)


@pytest.fixture
def toy_run(places, monkeypatch):
    """Makes runs with the column in the engine: (run, rows that the programs of the learner were given)."""
    placed = []
    place = RowLayout.place

    def note(self, rows, *args):
        placed.append(rows)
        return place(self, rows, *args)

    monkeypatch.setattr(RowLayout, 'place', note)
    monkeypatch.setattr(toys, 'ToyBackend', PlacesBackend)
    monkeypatch.setattr(toys, 'ToyLearner', SpmdToyLearner)
    return lambda **options: (toys.ToyRun(steps=4, checkpoint_every=2, **options).run(), placed)


def test_a_column_of_a_test_reaches_the_loss_by_its_name(toy_run):
    run, placed = toy_run(top_k=2)
    trained = [one for group in run.learner.groups for one in group.trajectories]
    for one in trained:
        check_places(one)
        assert all({*part.columns} == {'places', 'sampling_logprobs'} for part in one.segments)
    assert max(len(one.segments) for one in trained) > 1  # new weights interrupted an answer
    token_at = {
        (100 * one.prompt.draw + one.sample, position): (token, version)
        for one in trained
        for position, (token, version) in enumerate(zip(one.tokens, one.policy_versions, strict=True))
        if version >= 0
    }
    seen = set()
    for rows in placed:
        assert 'sampling_logprobs' not in rows
        assert rows['places'].shape == (*rows['targets'].shape, 2)
        assert (rows['places'][~rows['loss_mask']] == -7).all()
        for place, *token in zip(
            *(rows[name][rows['loss_mask']] for name in ('places', 'targets', 'policy_versions')), strict=True
        ):
            assert token_at[tuple(place)] == tuple(token)
            seen.add(tuple(place))
    assert seen == set(token_at)


def test_a_resumed_run_has_the_column_of_what_was_generated_before(toy_run):
    whole, _ = toy_run()
    checkpoint = whole.checkpoints[0]
    state = decode_run_state(json.loads(json.dumps(encode_run_state(checkpoint['run_state']))))
    partial = [part for group in state['running'] for episode in group.episodes for part in episode.segments]
    assert any('places' in part.columns for part in partial)
    resumed, _ = toy_run(resume=checkpoint | {'run_state': state})
    for group in resumed.learner.groups:
        for one in group.trajectories:
            check_places(one)
    assert resumed.learner.w == whole.learner.w


def test_a_column_moves_with_a_request_whose_server_dies(places, monkeypatch):
    deliver = RemoteGeneration.deliver

    def with_places(self, segment=None, reason=None):
        if segment is not None:
            start = len(self.request.prompt_tokens) + self.tokens - 1
            segment = dataclasses.replace(segment, columns={'places': places_of(self.request, start, 1)})
        deliver(self, segment, reason)

    monkeypatch.setattr('tests.rollout.servers.toy_server.RemoteGeneration.deliver', with_places)
    monkeypatch.setattr('tests.rollout.toy_engine.ToyGeneration', RemoteGeneration)

    async def script(rig):
        (answer,) = rig.ask(request(3, tokens=20))
        await rig.until(lambda: len(answer.segments) > 4)
        rig.servers[int(answer.generation.engine[-1])].die()
        await rig.end_of([answer])
        return answer

    answer = ServerRig().run(script)
    assert answer.generation.attempts == 1
    found = np.concatenate([part.columns['places'] for part in answer.segments])
    np.testing.assert_array_equal(found, places_of(request(3), 3, 20))


@pytest.mark.usefixtures('places')
def test_a_column_travels_from_our_server_to_its_client(tmp_path, monkeypatch):
    monkeypatch.setattr('tests.rollout.http.server.rig.SlowBackend', SlowPlacesBackend)
    with ToyServer(slots=2) as server:
        server.backend.step_s = 0.01

        async def script(bench):
            assert isinstance(bench.engine, OwnEngine)
            (one,) = bench.collect(3)
            await bench.pass_time(0.02)
            await bench.load(1)
            await bench.end_of(one)
            return one

        one = Bench(Factory(server, tmp_path)).run(script)
    assert len({part.policy_version for part in one.segments}) == 2
    found = np.concatenate([part.columns['places'] for part in one.segments])
    np.testing.assert_array_equal(found, places_of(one.generation.request, len(PROMPT), LONGEST))


def test_what_is_not_generated_or_not_known_has_the_fill_value(places):
    known = dataclasses.replace(segment([4, 5], 1), columns={'places': np.array([[1, 2], [3, 4]], np.int32)})
    one = trajectory([1, 2], [known, segment([6], -1), segment([7], 2)])
    assert one.column(PLACES).tolist() == [[-7, -7]] * 2 + [[1, 2], [3, 4]] + [[-7, -7]] * 2
    assert one.column(SAMPLING_LOGPROBS).tolist() == one.behavior_logprobs.tolist()


# Declarations.


@pytest.mark.parametrize(
    ('column', 'message'),
    [
        (Column('places', 'int16', fill=-7), r"column 'places' is declared twice, as .*int16.*int32.*: give the new"),
        (Column('Places', 'int32'), "column 'Places' has no name in the form of a_name_2: give it another name"),
        (Column('targets', 'int32'), "column 'targets' is the name of something else: give it another name"),
        (Column('more', 'number'), "column 'more' has the dtype 'number': use "),
        (Column('more', 'i4'), "column 'more' has the dtype 'i4': use the name of a bool, an integer or a float"),
        (Column('more', 'int64'), 'is packed as int64: devices hold 32 bits: declare such a dtype or packed=False'),
        (Column('more', 'uint8', fill=-1), "column 'more' has the fill value -1: use one of uint8"),
        (Column('more', 'int32', is_logprob=True), "column 'more' is a log-prob of int32"),
        (
            Column('more', 'uint8', None),
            "column 'more' has no shape of its own: declare an unsigned integer and",
        ),
    ],
)
def test_a_declaration_that_does_not_hold_is_refused(places, column, message):
    with pytest.raises(ColumnError, match=message):
        declare(column)
    assert [*columns.DECLARED] == ['sampling_logprobs', 'routed_experts', 'places']


def test_the_same_declaration_again_changes_nothing(places):
    assert declare(dataclasses.replace(PLACES)) == PLACES
    assert columns.declared() == (SAMPLING_LOGPROBS, ROUTED_EXPERTS, PLACES)


def test_no_column_can_be_named_as_what_stands_beside_it():
    rows, _ = training_rows(empty_batch(1, 1, 4, 4), Likelihood())
    fields = {f.name for kind in (Segment, areal_jax.types.PackedBatch) for f in dataclasses.fields(kind)}
    call = name_answers(vllm.parse({'token_ids': [1], 'sampling_params': {}}), 'r')
    choice = vllm.render(call, [Answer('r', np.ones(1, np.int32))], ReplyInfo('', 0))['choices'][0]
    # vLLM's choices have a field that is null here: a column may fill it
    assert {*rows, *fields, *choice} - columns.TAKEN == {'columns', ROUTED_EXPERTS.name, 'sampling_mask'}


@pytest.mark.parametrize(
    ('name', 'values', 'message'),
    [
        ('place', np.zeros((2, 2), np.int32), "column 'place' is not declared, only .*: import the module that"),
        ('places', np.zeros((2, 2)), "column 'places' has the dtype float64: give int32, or declare the other"),
        ('places', np.zeros((3, 2), np.int32), r"'places' has the shape \(3, 2\): give one entry .* each of 2 tokens"),
        ('places', np.zeros(2, np.int32), r"'places' has the shape \(2,\): .* \(2, 2\)"),
    ],
)
def test_an_array_that_is_not_as_declared_is_refused_where_it_is_made(places, name, values, message):
    with pytest.raises(ColumnError, match=message):
        Segment(np.ones(2, np.int32), np.zeros(2, np.float32), 0, {name: values})
    with pytest.raises(ColumnError, match=message):
        Piece(np.ones(2, np.int32), np.zeros(2, np.float32), '0', {name: values})


@pytest.mark.parametrize(
    'values',
    [[[1, 2]], [[1, 2], [3]], [[1, 2], [3, 0.5]], [[1, 2], None], 7, *([one] * 2 for one in ([1, 2**40], [1, 2.0]))],
)
def test_lists_that_are_not_as_declared_are_refused(places, values):
    with pytest.raises(ColumnError, match="column 'places'"):
        PLACES.read(values, 2)


def test_lists_come_back_as_they_were(places):
    for column, values in (
        (PLACES, np.array([[1, 2], [3, 4]], np.int32)),
        (PLACES, np.zeros((0, 2), np.int32)),
        (Column('share', 'float32'), np.array([0.1, np.nan, -0.0], np.float32)),
        (Column('seen', 'bool'), np.array([True, False])),
    ):
        found = column.read(json.loads(json.dumps(values.tolist())), len(values))
        assert (found.dtype, found.shape, found.tobytes()) == (values.dtype, values.shape, values.tobytes())


def test_a_column_of_the_model_is_written_as_bytes_and_read_as_it_was():
    values = np.arange(24, dtype=np.uint16).reshape(3, 4, 2)
    written = json.loads(json.dumps(ROUTED_EXPERTS.write(values)))
    assert (written['dtype'], written['shape'], len(written['data'])) == ('uint16', [3, 4, 2], 64)
    for n in (3, None):
        found = ROUTED_EXPERTS.read(written, n)
        assert (found.dtype, found.tolist()) == (np.uint16, values.tolist())
    own = ROUTED_EXPERTS.of_model('uint16', (4, 2))
    assert (own.blank(2).tolist(), own.fill) == ([[[65535] * 2] * 4] * 2, 65535)
    with pytest.raises(
        ColumnError, match="'routed_experts' has no shape of its own: ask the declaration for the model"
    ):
        ROUTED_EXPERTS.blank(1)


@pytest.mark.parametrize(
    'changes',
    [
        {'data': 'AAAA!'}, {'data': 'AAAA'}, {'dtype': 'float16'}, {'dtype': 'what'}, {'shape': [2, 6, 2]},
        {'shape': [7, 7]}, {'shape': None}, {'data': None},
    ],
)  # fmt: skip
def test_bytes_that_are_no_column_of_the_model_are_refused(changes):
    written = ROUTED_EXPERTS.write(np.arange(24, dtype=np.uint16).reshape(3, 4, 2))
    with pytest.raises(ColumnError, match="column 'routed_experts'"):
        ROUTED_EXPERTS.read(written | changes, 3)
    with pytest.raises(ColumnError, match="column 'routed_experts'"):
        ROUTED_EXPERTS.read([1, 2, 3], 3)


@pytest.mark.parametrize(
    'column', [ROUTED_EXPERTS, SAMPLING_LOGPROBS, Column('kinds', 'int32'), Column('flags', 'bool')]
)
@pytest.mark.parametrize('n', [3, None])
def test_values_that_are_no_column_are_refused_whatever_they_are(column, n):
    written = column.write(np.zeros((3, 4, 2) if column.shape is None else 3, column.dtype))
    assert len(column.read(written, n)) == 3
    bytes_of = {'data': '', 'dtype': 'uint16', 'shape': [0, 4, 2]}
    for one in (*changed(written), *changed(bytes_of), *broken_dtypes(written)):
        found, message = None, ''
        try:
            found = column.read(one, n)
        except ColumnError as error:
            message = str(error)
        assert len(message) < 1000
        assert message or found.dtype.kind == np.dtype(column.dtype).kind
        assert message or n is None or len(found) == n


def broken_dtypes(written):
    """Texts that numpy evaluates, or takes memory for."""
    if isinstance(written, dict):
        for dtype in ('V99999999999', '(1', '(' * 300, ','.join(['f8'] * 9), '{}', 'O', 'M8[s]', 'u2,u2', '>u2', 'U1'):
            yield {**written, 'dtype': dtype}
        for shape in ([], [10**30], [-1, -1], [2**62, 2**62], [3.0, 4, 2], [[3]], '342', [math.inf]):
            yield {**written, 'shape': shape}


def test_a_row_keeps_the_part_of_a_context_that_no_policy_generated():
    values = np.arange(6, dtype=np.uint8).reshape(6, 1, 1)
    ones = lambda n, version: Segment(np.ones(n, np.int32), np.zeros(n, np.float32), version)
    row = Row()
    row.append(dataclasses.replace(ones(2, 0), context={'routed_experts': values[:2]}))
    row.append(ones(1, areal_jax.types.NOT_GENERATED))
    row.append(dataclasses.replace(ones(1, 0), context={'routed_experts': values[:5]}))
    kept = [s.context.get('routed_experts', np.zeros(0)).ravel().tolist() for s in row.segments]
    assert kept == [[0, 1], [], [4]]
    with pytest.raises(ColumnError, match='routed_experts'):
        dataclasses.replace(ones(1, 0), context={'routed_experts': values.astype(np.float32)})


def test_one_place_declares_each_column_and_few_others_name_it():
    """Who fills it, who reads it, which servers give it, and the glossary."""
    package = pathlib.Path(areal_jax.__file__).parent
    names = {str(p.relative_to(package)) for p in package.rglob('*.py') if 'sampling_logprobs' in p.read_text().lower()}
    used = {'columns.py', 'rollout/decode/generate.py', 'learning/objective/counting.py'}
    assert names == used | {'config/kinds.py', 'config/generation.py', '__init__.py', 'control/frictions.py'}
    names = {str(p.relative_to(package)) for p in package.rglob('*.py') if 'ROUTED_EXPERTS' in p.read_text()}
    filled, checked = {'columns.py', 'models/families.py', 'models/experts.py'}, {'rollout/http/wire/exchange.py'}
    counted = {'learning/diagnostics/measurement.py', 'learning/diagnostics/expert_loads.py'}
    assert names == filled | checked | counted | {'learning/forward.py'}
