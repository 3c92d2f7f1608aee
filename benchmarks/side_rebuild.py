"""Our side of generation.py where the KV cache is computed again: an engine under the virtual clock.

The virtual clock does the work of the lanes inline and never sleeps. Tasks:

  prompts   prefills sequences that arrive as prompts
  rebuild   prefills the same tokens again, as prompts with unfinished answers that new weights interrupted
  group     counts the tokens prefilled for the samples of one prompt that arrive in several admissions
  separate  the same for as many prompts of the same length
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from areal_jax import protocols
from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.events.schema import Event
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.types import GenerationRequest, PublishedWeights, SamplingParams, Segment, Weights
from benchmarks.side_engine import LANES, generate_all, load_model, make_backend, make_engine
from benchmarks.sides import Call, Start, Stopwatch, serve
from benchmarks.workload import FIRST_TOKEN

# seconds a unit of work; no count and no work depends on them
PRICES = {'decode': 0.01, 'prefill': 0.0001, 'load': 0.01}
ROOM_DISPATCHES = 40  # of decoding until an interrupted answer would end: other answers are prefilled between them


def prepare(arguments: dict[str, Any]) -> Start:
    decoder, weights = load_model(arguments['model'])

    def start() -> tuple[Call, Any]:
        backend = make_backend(decoder, arguments['engine'])
        programs = backend.warm_up(backend.prepare(weights))
        task = {'prompts': prefill_prompts, 'rebuild': rebuild, 'group': count_prefilled, 'separate': count_prefilled}

        def call() -> Mapping[str, float]:
            return task[arguments['task']](Run(backend, weights, arguments))

        return call, lambda: {'clock': 'virtual', 'programs': programs}

    return start


class Run:
    """One engine under a clock of its own, and what its log says of prefills."""

    def __init__(self, backend: JaxDecodeBackend, weights: Weights, arguments: Mapping[str, Any]):
        self.arguments, self.steps = arguments, arguments['engine']['decode_steps']
        self.log = EventLog()
        self.clock = VirtualClock(LANES, self.log, PRICES)
        self.supervisor = Supervisor(self.clock)
        self.engine: LocalEngine = make_engine(backend, self.clock, self.log, weights, self.steps)
        self.vocabulary = arguments['model']['vocab_size']

    def random_tokens(self, count: int, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).integers(FIRST_TOKEN, self.vocabulary, count).astype(np.int32)

    def prefilled(self) -> int:
        """Tokens computed by all prefills so far."""
        return sum(event['tokens'] for event in self.log.events if event['kind'] == 'prefill')


class PrefillWatch:
    """Time from an event of the log to the end of the last prefill after it, without the dispatches of decoding."""

    def __init__(self, run: Run):
        self._watch, self._run = Stopwatch(), run
        self._first, self._parts, self._tokens = 0, self._watch.parts(), 0
        self._armed = False
        run.log.listeners.append(self._note)

    def start(self) -> None:
        self._armed, self._first = True, self._run.prefilled()
        self._watch.start()

    def stop(self) -> dict[str, float]:
        self._armed = False
        return {'tokens': float(self._tokens), **self._parts}

    def _note(self, event: Event) -> None:
        if not self._armed or event['kind'] not in ('run_start', 'run_done'):
            return
        starts = event['kind'] == 'run_start'
        if event['work'] == 'decode':
            (self._watch.stop if starts else self._watch.start)()
        elif event['work'] == 'prefill' and not starts:
            self._watch.stop()
            self._parts, self._tokens = self._watch.parts(), self._run.prefilled() - self._first
            self._watch.start()


def prefill_prompts(run: Run) -> Mapping[str, float]:
    sequences, tokens = run.arguments['sequences'], run.arguments['prompt_tokens'] + run.arguments['answer_tokens']
    sampling = SamplingParams(run.steps, 1.0, 0, 1.0, ())
    requests = [GenerationRequest(i, 0, 0, run.random_tokens(tokens, i), sampling) for i in range(sequences)]
    watch = PrefillWatch(run)

    async def program() -> None:
        run.engine.start(run.supervisor)
        watch.start()
        await generate_all(run.engine, run.clock, run.supervisor, requests)

    run.clock.execute(run.supervisor.run(program()))
    return watch.stop()


def rebuild(run: Run) -> Mapping[str, float]:
    """Answers that an engine took over unfinished are interrupted when all of them are decoded."""
    done = run.arguments['answer_tokens']
    sampling = SamplingParams(done + ROOM_DISPATCHES * run.steps, 1.0, 0, 1.0, ())
    requests = []
    for draw in range(run.arguments['sequences']):
        tokens = run.random_tokens(run.arguments['prompt_tokens'] + done, draw)
        prompt, answer = np.split(tokens, [run.arguments['prompt_tokens']])
        prefix = Segment(answer, np.full(done, -1.0, np.float32), 0)
        requests.append(GenerationRequest(draw, 0, 0, prompt, sampling, (prefix,)))
    watch = PrefillWatch(run)
    all_decoded = [run.clock.event(f'all answers are decoded under version {version}') for version in range(2)]

    def note(event: Event) -> None:
        if event['kind'] == 'decode' and event['tokens'] == run.steps * len(requests):
            all_decoded[event['version']].set()
        if event['kind'] == 'interrupt':
            watch.start()

    run.log.listeners.append(note)

    async def program() -> None:
        run.engine.start(run.supervisor)
        run.supervisor.start('answers', generate_all(run.engine, run.clock, run.supervisor, requests))
        await run.clock.wait(all_decoded[0])
        await run.engine.stage(PublishedWeights(1, '', None))
        await run.engine.swap(1)
        await run.clock.wait(all_decoded[1])  # the answers are not of interest: what is left of them is cancelled

    run.clock.execute(run.supervisor.run(program()))
    return watch.stop()


def count_prefilled(run: Run) -> Mapping[str, float]:
    """Three admissions and one interruption.

    The second admission comes when all of the first are decoded, new weights when every slot is, the third when the
    interrupted answers are rebuilt: what is asked for does not depend on how long the prefills take.
    """
    of_group = run.arguments['task'] == 'group'
    admissions = np.array_split(np.arange(run.arguments['sequences']), 3)
    slots = run.arguments['engine']['slots']
    first_decoded, all_decoded, rebuilt = map(run.clock.event, ('first admission', 'every slot', 'rebuilt'))

    def note(event: Event) -> None:
        if event['kind'] == 'load':
            rebuilt.set()
        if event['kind'] == 'decode':
            live = sum(request is not None for request in event['slots'])
            if live >= len(admissions[0]):
                first_decoded.set()
            if live == slots:
                all_decoded.set()

    def request(number: int) -> GenerationRequest:
        draw, sample = (0, number) if of_group else (number, 0)
        sampling = SamplingParams(run.arguments['answer_tokens'], 1.0, 0, 1.0, ())
        return GenerationRequest(draw, sample, 0, run.random_tokens(run.arguments['prompt_tokens'], draw), sampling)

    async def publish() -> None:
        await run.clock.wait(all_decoded)
        await run.engine.stage(PublishedWeights(1, '', None))
        await run.engine.swap(1)

    async def admit(numbers: np.ndarray, after: protocols.Event) -> None:
        await run.clock.wait(after)
        await generate_all(run.engine, run.clock, run.supervisor, [request(int(number)) for number in numbers])

    async def program() -> None:
        run.engine.start(run.supervisor)
        run.supervisor.start('publish', publish())
        begin = run.clock.event('begin')
        begin.set()
        events = (begin, first_decoded, rebuilt)
        for task in [
            run.supervisor.start(f'admission {i}', admit(*admission))
            for i, admission in enumerate(zip(admissions, events, strict=True))
        ]:
            await task

    run.log.listeners.append(note)
    run.clock.execute(run.supervisor.run(program()))
    interruptions = [event for event in run.log.events if event['kind'] == 'interrupt']
    return {'tokens': float(run.prefilled()), 'interrupted': float(sum(len(e['requests']) for e in interruptions))}


if __name__ == '__main__':
    serve(prepare)
