"""Equal weights give equal bits in process, over HTTP and behind JetStream; new weights show at the recorded token."""

from __future__ import annotations

import time

import numpy as np
import pytest

from areal_jax.types import GenerationRequest, PublishedWeights, SamplingParams
from tests.rollout.http.server.rig import write_weights
from tests.rollout.jetstream.model_rig import LONGEST, SLOTS, STEPS, InProcess, JetstreamServer, OwnServer, drive, score
from tests.rollout.jetstream.rig import needs_jetstream

pytestmark = [pytest.mark.slow, needs_jetstream]
SERVERS = {'own': OwnServer, 'jetstream': JetstreamServer}


def request(draw, new, **sampling):
    fields = {'temperature': 1.0, 'top_k': 0, 'top_p': 1.0, 'stop_tokens': ()} | sampling
    prompt = np.arange(3 + draw % 5, dtype=np.int32) * 7 + draw
    return GenerationRequest(draw, draw % 3, 11, prompt, SamplingParams(new, **fields))


REQUESTS = [
    request(1, 1), request(2, STEPS), request(3, STEPS + 1, temperature=0.7), request(4, 50, top_k=5),
    request(5, 100, top_p=0.8, temperature=1.3), request(6, 33, temperature=0.0),
    request(7, 200, stop_tokens=(3, 4, 5)), request(8, 64), request(9, 300), request(10, 20, min_p=0.05),
]  # fmt: skip


async def answer(engine, asked):
    """(ids, bytes of the log-probs of both kinds, reason)."""
    generation = engine.generate(asked)
    segments = [segment async for segment in generation]
    arrays = [np.concatenate([s.tokens for s in segments]), np.concatenate([s.behavior_logprobs for s in segments])]
    if asked.sampling.changes_softmax:
        arrays.append(np.concatenate([s.columns['sampling_logprobs'] for s in segments]))
    return arrays[0].tolist(), [array.tobytes() for array in arrays[1:]], generation.finish_reason


async def all_answers(engine, clock, supervisor):
    """All at once, through eight slots, and then one by one."""
    together = {}

    async def take(asked):
        together[asked.draw] = await answer(engine, asked)

    tasks = [supervisor.start('answer', take(asked)) for asked in REQUESTS]
    for task in tasks:
        await task
    return [together[asked.draw] for asked in REQUESTS], [await answer(engine, asked) for asked in REQUESTS]


@pytest.fixture(scope='module')
def in_process(tmp_path_factory):
    return drive(InProcess(), tmp_path_factory.mktemp('in_process'), all_answers)


def test_the_company_of_a_request_does_not_change_its_bits(in_process):
    together, alone = in_process
    assert together == alone


@pytest.mark.parametrize('name', SERVERS)
def test_a_server_gives_the_bits_of_the_engine_in_process(name, in_process, tmp_path):
    with SERVERS[name]() as server:
        found = drive(server, tmp_path, all_answers)
    assert found[0] == in_process[0]
    assert found[1] == in_process[1]
    lengths = [len(ids) for ids, _, _ in found[0]]
    assert lengths[0] == 1
    assert {reason for _, _, reason in found[0]} == {'length', 'stop'}


@pytest.mark.parametrize('name', SERVERS)
def test_weights_swapped_while_eight_answers_run_show_at_the_recorded_token(name, tmp_path, monkeypatch):
    """Under the version of another token the log-probs would be wrong by more than 0.1 in the median."""
    asked = [request(draw, LONGEST) for draw in range(SLOTS)]
    server = SERVERS[name]()
    decoded = lambda: server.engine.stream.totals.decoded_tokens

    async def script(engine, clock, supervisor):
        found = {}

        async def take(one):
            found[one.draw] = [segment async for segment in engine.generate(one)]

        tasks = [supervisor.start('answer', take(one)) for one in asked]
        for version in (1, 2):
            while decoded() < version * 10 * SLOTS * STEPS:  # a dispatch has 64 tokens: after 10 of 50, and after 20
                await clock.wait(clock.event('more tokens'), 0.005)
            await engine.stage(PublishedWeights(version, '', write_weights(tmp_path / str(version), version)))
            await engine.swap(version)
        for task in tasks:
            await task
        return [found[one.draw] for one in asked]

    generate = server.backend.generate
    monkeypatch.setattr(server.backend, 'generate', lambda *a: (time.sleep(0.02), generate(*a))[1])
    with server:
        answers = drive(server, tmp_path, script)
    seeds = {0: 0, 1: 1, 2: 2}
    for one, segments in zip(asked, answers, strict=True):
        ids = [int(token) for s in segments for token in s.tokens]
        versions = [s.policy_version for s in segments for _ in s.tokens]
        recorded = np.concatenate([s.behavior_logprobs for s in segments])
        assert len(ids) == LONGEST
        assert versions == sorted(versions)
        assert len(set(versions)) >= 2
        assert np.abs(recorded - score(one.prompt_tokens, ids, versions, seeds)).max() < 1e-5
        wrong = [(version + 1) % 3 for version in versions]
        assert np.median(np.abs(recorded - score(one.prompt_tokens, ids, wrong, seeds))) > 0.1
