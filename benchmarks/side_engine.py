"""Our side of generation.py: requests submitted at once to a LocalEngine over JaxDecodeBackend, as in a run."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_jax.app.process.setup import return_freed_memory
from areal_jax.config.generation import RolloutSection
from areal_jax.control.clocks.loop import LoopClock
from areal_jax.control.clocks.real import RealClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.formats.hf_directory import load_hf
from areal_jax.lanes import engine_lane, publish_lane
from areal_jax.models import families  # whose names another checkout may not have
from areal_jax.models.decoder import Decoder
from areal_jax.native.compiled_library import keep_blocks
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.types import GenerationRequest, SamplingParams, Segment, Weights
from benchmarks.sides import Call, Start, Stopwatch, serve
from benchmarks.workload import Requests, load_requests

LANES = {lane(0): 1 for lane in (engine_lane, publish_lane)}
STALL_S = 3600.0


def prepare(arguments: dict[str, Any]) -> Start:
    return_freed_memory()  # as every command does
    keep_blocks()
    decoder, weights = load_model(arguments['model'])

    def start() -> tuple[Call, Any]:
        backend = make_backend(decoder, arguments['engine'])
        programs = backend.warm_up(backend.prepare(weights))
        requests = make_requests(load_requests(arguments['requests']), arguments['temperature'])
        steps = arguments['engine']['decode_steps']
        facts = {'clock': 'real', 'programs': programs, 'cache_bytes': backend.state_bytes}
        return lambda: answer(backend, weights, requests, steps), lambda: facts

    return start


def load_model(model: str | Mapping[str, Any]) -> tuple[Decoder, Weights]:
    """Of a directory, or of a shape with random weights; the decoder in the form in which engines run it."""
    if isinstance(model, str):
        config, weights = load_hf(model)
        return Decoder(config), weights
    kinds = tuple(families.LayerKind(**kind) for kind in model['kinds'])  # JSON has no dataclasses
    config = families.ModelConfig(**{**model, 'kinds': kinds})
    return Decoder(config), Decoder(config).init(seed=0)


def make_backend(decoder: Decoder, sizes: Mapping[str, Any]) -> JaxDecodeBackend:
    lists = {'prefill_buckets': tuple(sizes['prefill_buckets'])}  # JSON has no tuples
    return JaxDecodeBackend(decoder, filtered=False, dtype='float32', **{**sizes, **lists})


def make_engine(
    backend: JaxDecodeBackend, clock: LoopClock, log: EventLog, weights: Weights, steps: int
) -> LocalEngine:
    return LocalEngine(
        0, backend, clock, log, receive=lambda published: weights, version=0, params=weights,
        rollout=RolloutSection(decode_steps=steps),
    )  # fmt: skip


def make_requests(requests: Requests, temperature: float) -> list[GenerationRequest]:
    return [
        GenerationRequest(draw, 0, 0, prompt, SamplingParams(n, temperature, 0, 1.0, ()))
        for draw, (prompt, n) in enumerate(zip(requests.prompts, requests.new_tokens, strict=True))
    ]


def answer(
    backend: JaxDecodeBackend, weights: Weights, requests: Sequence[GenerationRequest], steps: int
) -> Mapping[str, float]:
    """Timed from the submission of the first request to the end of the last; the engine exists before."""
    # the engine of the call before is a circle of references with 1.5 GB; a run, like vLLM's side, has one engine
    gc.collect()
    log = EventLog()
    clock = RealClock(LANES, log, STALL_S)
    supervisor = Supervisor(clock)
    engine = make_engine(backend, clock, log, weights, steps)
    watch = Stopwatch()

    async def program() -> list[Segment]:
        engine.start(supervisor)
        watch.start()
        segments = await generate_all(engine, clock, supervisor, requests)
        watch.stop()
        return segments

    segments = clock.execute(supervisor.run(program()))
    logprobs = np.concatenate([segment.behavior_logprobs for segment in segments])
    return {
        'tokens': float(len(logprobs)),
        'mean_logprob': math.fsum(logprobs) / len(logprobs),
        **count_positions(log),
        **watch.parts(),
    }


async def generate_all(
    engine: LocalEngine, clock: LoopClock, supervisor: Supervisor, requests: Sequence[GenerationRequest]
) -> list[Segment]:
    """Segments of all answers to requests that are submitted at once."""
    segments: list[Segment] = []
    left = len(requests)
    ended = clock.event('the end of the last answer')

    async def follow(request: GenerationRequest) -> None:
        nonlocal left
        segments.extend([segment async for segment in engine.generate(request)])
        left -= 1
        if not left:
            ended.set()

    for request in requests:
        supervisor.start(f'request {request.request_id}', follow(request))
    await clock.wait(ended)
    return segments


def count_positions(log: EventLog) -> dict[str, float]:
    """Positions of the cache that attention had to read, and those it read."""
    decodes = [event for event in log.events if event['kind'] == 'decode']
    return {key: float(sum(event.get(key, 0) for event in decodes)) for key in ('positions', 'positions_read')}


if __name__ == '__main__':
    serve(prepare)
