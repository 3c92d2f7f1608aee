"""An engine that decodes SmolLM2-135M in bfloat16 while versions arrive through a channel: its pauses and its rate.

For the rate all versions are sent before, so that what is measured is the engine's process. argv[1] is a JSON object,
one JSON line is printed.
"""

from __future__ import annotations

import gc
import itertools
import pathlib
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.app.parts.engines import bind_fetch
from areal_jax.control.clocks.real import RealClock
from areal_jax.control.event_writer import EventLog
from areal_jax.events.schema import Event
from areal_jax.formats.gguf import find_package_file, load_gguf
from areal_jax.lanes import engine_lane
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.report.event_log import lane_intervals
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend
from areal_jax.types import PublishedWeights, Tree, Weights
from benchmarks.carriers import open_channel
from benchmarks.interrupted_engine import InterruptedEngine, Load, Policy
from benchmarks.side_engine import LANES, STALL_S
from benchmarks.side_staged import GGUF, main, update

SLOTS, CONTEXT_TOKENS, DECODE_STEPS = 8, 320, 4
VOCABULARY = 40000  # the ids that prompts are drawn from


def find_swap_gaps(events: Sequence[Event]) -> dict[str, Any]:
    """Gaps between two dispatches: 'median_gap_s', and 'swap_gaps_s', those in which weights were swapped.

    A prefill is a dispatch of its own, so that no gap holds one. 'dispatch_s' is the median decode dispatch.
    """
    lane = engine_lane(0)
    dispatches = sorted((i.start, i.end, i.work) for i in lane_intervals(events) if i.lane == lane)
    gaps = [(end, start) for (_, end, _), (start, _, _) in itertools.pairwise(dispatches)]
    swaps = [event['time'] for event in events if event['kind'] == 'interrupt']
    return {
        'median_gap_s': statistics.median(start - end for end, start in gaps),
        'dispatch_s': statistics.median(end - start for start, end, work in dispatches if work == 'decode'),
        'swap_gaps_s': [start - end for end, start in gaps if any(end <= time <= start for time in swaps)],
        'swaps': len(swaps),
    }


def make_backend(config: ModelConfig) -> JaxDecodeBackend:
    return JaxDecodeBackend(
        Decoder(config), slots=SLOTS, context_tokens=CONTEXT_TOKENS, block_tokens=64, prefill_buckets=(256,),
        decode_steps=DECODE_STEPS, filtered=False, dtype='bfloat16', batch_buckets=(SLOTS,),
    )  # fmt: skip


def make_load(seed: int, updates: int) -> Load:
    return Load(
        prompt_tokens=32, mean_tokens=64, limit_tokens=CONTEXT_TOKENS - 64, sigma=0.75, vocabulary=VOCABULARY,
        seed=seed, group_size=1, warm_up=1, updates=updates,
    )  # fmt: skip


def round_weights(params: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), params)


def measure_swaps(channel: str, swaps: int, lr: float, seed: int) -> dict[str, Any]:
    """{policy: find_swap_gaps} of a delta after the other, each sent when the engine asks for it.

    Two versions take turns, so that a record takes a fraction of a second to make; it is made before it is fetched and
    has no part in the gap at its swap.
    """
    config, params, _ = load_gguf(find_package_file(GGUF))
    device, backend, load = jax.devices()[0], make_backend(config), make_load(seed, swaps)
    versions = [round_weights(params), round_weights(update(params, np.random.default_rng(seed), lr))]
    del params
    found: dict[str, Any] = {}
    policies: tuple[Policy, ...] = ('keep', 'recompute')
    for policy in policies:
        with tempfile.TemporaryDirectory() as folder:
            carried = open_channel(channel, pathlib.Path(folder), config, delta=True)
            fetch = bind_fetch(carried, device, backend)

            def receive(published: PublishedWeights, fetch: Any = fetch, carried: Any = carried) -> Weights:
                weights = fetch(carried.transfer(published.version, versions[published.version % 2]))
                carried.release(published.version)
                return weights

            first = receive(PublishedWeights(0, '', None))
            backend.warm_up(first)
            log = EventLog()
            engine = InterruptedEngine(
                RealClock(LANES, log, STALL_S), log, backend, first, load, policy, decode_steps=DECODE_STEPS,
                interval_s=0.0, receive=receive,
            )  # fmt: skip
            engine.measure()
            found[policy] = find_swap_gaps(log.events)
    return found


def measure_rates(
    channel: str, delta: bool, interval_s: float, updates: int, lr: float, seed: int, turns: int
) -> dict[str, Any]:
    """Runs without new weights and with them, in turns; 'rates' has tokens a second of each run."""
    config, params, _ = load_gguf(find_package_file(GGUF))
    device, backend, load = jax.devices()[0], make_backend(config), make_load(seed, updates)
    rng, sent = np.random.default_rng(seed), []
    rates: dict[Policy, list[float]] = {'none': [], 'keep': [], 'recompute': []}
    with tempfile.TemporaryDirectory() as folder:
        carried = open_channel(channel, pathlib.Path(folder), config, delta=delta)
        for version in range(2 + updates):
            params = update(params, rng, lr) if version else params
            sent.append(carried.transfer(version, round_weights(params)))
        del params
        fetch = bind_fetch(carried, device, backend)
        first = fetch(sent[0])
        backend.warm_up(first)
        for policy in [*rates] * turns:
            gc.collect()
            log = EventLog()
            engine = InterruptedEngine(
                RealClock(LANES, log, STALL_S), log, backend, first, load, policy, decode_steps=DECODE_STEPS,
                interval_s=interval_s, receive=lambda published: fetch(sent[published.version]),
            )  # fmt: skip
            counts = engine.measure()
            rates[policy].append(counts['tokens'] / counts['clock_s'])
    return {'rates': rates, 'bytes': [one.size and one.size.nbytes for one in sent]}


def measure(what: Literal['rates', 'swaps'], **arguments: Any) -> dict[str, Any]:
    return {'rates': measure_rates, 'swaps': measure_swaps}[what](**arguments)


if __name__ == '__main__':
    main(measure)
