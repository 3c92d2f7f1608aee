"""Admission by need against a fixed number of groups: how full the decoding slots are, and what that is worth.

    python -m benchmarks.admission --out=benchmarks/results/admission.json [--turns=5] [--groups=16] [--small]

The controller, pool, engines and buffer of a run under the virtual clock, with a backend that decodes nothing, prices
from flops and bytes (simulation/prices.py: R1-distill-Qwen-1.5B, an H800 an engine) and a learner that costs nothing:
generation alone is the limit. Four engines of 64 slots, groups of 16 answers, prompts of 512 tokens, lognormal answers
of mean 2,000 (sigma 0.75, at most 8,192), eta inf, 16 groups an update, dispatches of 16 steps. The length of an answer
is a function of its draw and sample; nothing that routes or admits knows it. Each turn has the lengths of another seed.

Tokens a second are counted from the third update on. `host_bytes` are the groups that the host holds at most, running
and buffered, as the bytes of their arrays; `ratio` is by need over fixed.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy as np

from areal_jax.config.generation import RolloutSection
from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.controller import Controller, LoopSettings, StepRecord
from areal_jax.control.event_writer import EventLog
from areal_jax.control.gate import StalenessGate
from areal_jax.control.supervisor import Supervisor
from areal_jax.events.schema import Event
from areal_jax.lanes import DISK, LEARNER, REWARD, engine_lane, publish_lane
from areal_jax.rollout.backend import DecodeOutput, DecodeRow
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.rollout.pool import Pool
from areal_jax.rollout.workflow import SingleTurn
from areal_jax.simulation.prices import H800, R1_DISTILL_1_5B, Reached, Roofline, step_overhead_s
from areal_jax.types import SamplingParams
from benchmarks.host_toys import FastBackend, ToyChannel, ToyLearner, ToyStream, ToyVerifier
from benchmarks.options import Row, make_parser, report, run, show
from benchmarks.workload import draw_lengths

BAR = 1.6
STOP = 0  # the token that ends an answer
BYTES_A_TOKEN = 12  # id, log-prob and version of a token on the host
PREFILL_TOKENS = 16384  # of a packed prefill
REACHED = Reached(bandwidth=0.6, prefill=0.5)
CHEAP_S = 1e-3  # of the learner, a verification, a publication


@dataclasses.dataclass(frozen=True)
class Load:
    """What is generated, and where."""

    engines: int = 4
    slots: int = 64
    group_size: int = 16
    groups_per_update: int = 16
    prompt_tokens: int = 512
    mean_tokens: int = 2000
    limit_tokens: int = 8192
    sigma: float = 0.75
    decode_steps: int = 16
    buffer_capacity: int = 64  # groups
    warm_up: int = 2  # updates
    updates: int = 12  # measured

    def lengths(self, seed: int) -> np.ndarray:
        """int [4096], used again and again."""
        rng = np.random.default_rng(seed)
        return draw_lengths(4096, self.mean_tokens, self.limit_tokens, self.sigma, rng)


SMALL = Load(engines=2, slots=8, group_size=4, groups_per_update=4, mean_tokens=64, limit_tokens=512, updates=3)


class DrawnBackend(FastBackend):
    """FastBackend whose answers end at lengths that were drawn beforehand."""

    def __init__(self, load: Load, lengths: np.ndarray, cache_tokens: int):
        super().__init__(
            load.slots, load.prompt_tokens + load.limit_tokens, largest_piece=PREFILL_TOKENS, cache_tokens=cache_tokens
        )
        self._load, self._lengths = load, lengths

    def generate(self, weights: int, state: int, rows: Sequence[DecodeRow], steps: int) -> tuple[int, DecodeOutput]:
        state, output = super().generate(weights, state, rows, steps)
        for column, row in enumerate(rows):
            number = row.request.draw * self._load.group_size + row.request.sample
            last = self._load.prompt_tokens + int(self._lengths[number % len(self._lengths)]) - 2 - row.position
            if last < steps:
                output.tokens[last, column] = STOP
                output.valid[last + 1 :, column] = False
        return state, output


class Occupancy:
    """Counts decoded tokens and taken slots of a log, while it is on."""

    def __init__(self) -> None:
        self.on, self.tokens, self.rows, self.dispatches = False, 0, 0, 0

    def note(self, event: Event) -> None:
        if event['kind'] == 'decode' and self.on:
            self.tokens += event['tokens']
            self.rows += sum(slot is not None for slot in event['slots'])
            self.dispatches += 1


def simulate(load: Load, max_running_groups: float, seed: int) -> dict[str, float]:
    """One run; inf = by need."""
    overhead_s = step_overhead_s(H800, R1_DISTILL_1_5B, REACHED)
    roofline = Roofline(H800, R1_DISTILL_1_5B, REACHED, step_overhead_s=overhead_s)
    log, counts = EventLog(keeps=False), Occupancy()
    log.listeners.append(counts.note)
    lanes = {LEARNER: 1, REWARD: 8, DISK: 1}
    lanes |= {lane(index): 1 for index in range(load.engines) for lane in (engine_lane, publish_lane)}
    prices = dict.fromkeys(('train', 'snapshot', 'publish', 'save', 'reward'), CHEAP_S)
    clock = VirtualClock(lanes, log, {**prices, **roofline.prices()})
    supervisor, channel = Supervisor(clock), ToyChannel()
    cache = min(roofline.cache_tokens(), load.slots * (load.prompt_tokens + load.limit_tokens))
    engines = [
        LocalEngine(
            index, DrawnBackend(load, load.lengths(seed), cache), clock, log, receive=channel.receive, version=0,
            params=0, rollout=RolloutSection(decode_steps=load.decode_steps),
        )
        for index in range(load.engines)
    ]  # fmt: skip
    pool, steps = Pool(engines, clock, log, supervisor), load.warm_up + load.updates
    gate = StalenessGate(
        groups_per_update=load.groups_per_update, eta=math.inf, max_running=max_running_groups,
        buffer_capacity=load.buffer_capacity, max_admitted=2 * steps * load.groups_per_update,
    )  # fmt: skip
    window: list[tuple[float, int]] = []
    held: dict[str, float] = {}
    most = 0

    def on_step(step: StepRecord) -> None:
        if step.step >= load.warm_up:
            counts.on = True
            window.append((step.time_s, counts.tokens))
            for bound, seconds in step.idle_slots_s.items() if step.step > load.warm_up else ():
                held[bound] = held.get(bound, 0.0) + seconds

    def note_held(event: Event) -> None:
        nonlocal most
        most = max(most, gate.running + gate.buffered)

    log.listeners.append(note_held)
    controller = Controller(
        LoopSettings(
            steps=steps, group_size=load.group_size, groups_per_update=load.groups_per_update, oldest_kept=None,
            checkpoint_every=0, max_failed_groups=1, slots=load.slots,
        ),
        clock=clock, log=log, supervisor=supervisor, stream=ToyStream(load.prompt_tokens), pool=pool,
        workflow=SingleTurn(pool, SamplingParams(load.limit_tokens, 1.0, 0, 1.0, (STOP,)), seed),
        verifier=ToyVerifier(clock), learner=ToyLearner(), channel=channel, gate=gate, ring=None,
        update_tokens=lambda groups: 1, on_step=on_step, observer_state=dict, save_checkpoint=lambda *_: None,
    )  # fmt: skip

    async def program() -> None:
        for engine in engines:
            engine.start(supervisor)
        await controller.run()

    clock.execute(supervisor.run(program()))
    (start_s, first), (end_s, last) = window[0], window[-1]
    slot_s = (end_s - start_s) * load.engines * load.slots
    return {
        'tokens_s': (last - first) / (end_s - start_s), 'occupancy': counts.rows / counts.dispatches / load.slots,
        'clock_s': end_s - start_s, 'groups_held': most,
        'host_bytes': most * load.group_size * (load.prompt_tokens + load.mean_tokens) * BYTES_A_TOKEN,
        **{f'idle/{bound}': seconds / slot_s for bound, seconds in sorted(held.items())},
    }  # fmt: skip


def measure(options: argparse.Namespace) -> list[Row]:
    load = SMALL if options.small else Load(updates=options.updates, buffer_capacity=options.buffer_capacity)
    sides = {'by need': math.inf, f'{options.groups} groups': options.groups}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for seed in range(options.seed, options.seed + options.turns):
        for name, groups in sides.items():
            runs[name].append(simulate(load, groups, seed))
            show({'seed': seed, 'admission': name, **runs[name][-1]})
    by_need, fixed = runs.values()
    ratios = [one['tokens_s'] / other['tokens_s'] for one, other in zip(by_need, fixed, strict=True)]
    quartile = statistics.quantiles(ratios, n=4)[0] if len(ratios) > 1 else ratios[0]
    middle = statistics.median(ratios)
    row = {
        'cell': 'h800, lognormal', 'load': dataclasses.asdict(load), 'ratio': middle, 'quartile': quartile,
        'turns': options.turns, 'bar': BAR, 'met': middle >= BAR and quartile > 0.9 * BAR, 'runs': runs,
    }  # fmt: skip
    show(row)
    return [row]


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, turns=5)
    parser.add_argument('--groups', type=int, default=16, help='of the side with a fixed number')
    parser.add_argument('--updates', type=int, default=12, help='measured updates of a run')
    parser.add_argument('--buffer_capacity', type=int, default=64, help='groups, of both sides')
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> Row:
    options = read_options(arguments)
    return report('admission', arguments, options, lambda: measure(options))


if __name__ == '__main__':
    run('admission', main)
