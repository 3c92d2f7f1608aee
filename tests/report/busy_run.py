"""A made-up run with everything that a page shows: python -m tests.report.busy_run DIR [--updates=N].

Two engines with eight slots each; an answer takes one to five dispatches of four tokens. The learner takes eight groups
of one answer. New weights interrupt what is decoded, every ninth answer is preempted once, every tenth group is
dropped. The ledger closes. The answers in rollouts/ are longer ones, with results of a tool and masked tokens.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import pathlib
from typing import Any

import numpy as np

from areal_jax.config import CONFIG, default_config
from areal_jax.events.schema import FILE as EVENTS
from areal_jax.events.schema import VERSION
from areal_jax.telemetry.metrics import FILE as METRICS
from areal_jax.telemetry.rollout_writer import RolloutWriter
from areal_jax.text.decoding import TokenBytes
from areal_jax.types import NOT_GENERATED, TokenArrays, Trajectory, TrajectoryGroup
from tests.learning.examples import segment, trajectory
from tests.telemetry.logs import event_log, two_facts, work

ENGINES, SLOTS, GROUPS, STEPS = 2, 8, 8, 4


class Answer:
    def __init__(self, draw: int):
        self.draw, self.request, self.left = draw, f'0/{draw}/0', 1 + draw * 7 % 5
        self.tokens: collections.Counter[int] = collections.Counter()  # by version
        self.preempted = self.fresh = False


class BusyRun:
    """Events and metrics, made dispatch by dispatch."""

    def __init__(self, updates: int):
        self.entries: list[tuple[float, str, dict[str, Any]]] = [(0.0, 'log', {'version': VERSION})]
        self.lines: list[dict[str, Any]] = []
        self._run = self._draws = self._version = self._dispatches = 0
        self._waiting: list[Answer] = []  # preempted
        self._buffer: list[Answer] = []
        self._slots: list[list[Answer | None]] = [[None] * SLOTS for _ in range(ENGINES)]
        self._time, self._generated = 1.0, 0
        while len(self.lines) < updates:
            self._dispatch(len(self.lines) < updates - 1)
        for answer in [a for slots in self._slots for a in slots if a] + self._waiting + self._buffer:
            self._end(answer, 'cancelled')

    def _add(self, time: float, kind: str, **fields: Any) -> None:
        self.entries.append((time, kind, fields))

    def _work(self, lane: str, kind: str, start: float, end: float) -> None:
        self._run += 1
        self.entries += work(lane, kind, start, end, self._run)

    def _next(self) -> Answer:
        if self._waiting:
            return self._waiting.pop()
        answer = Answer(self._draws)
        self._draws += 1
        self._add(self._time, 'draw', draw=answer.draw)
        self._add(self._time, 'admit', draw=answer.draw)
        return answer

    def _dispatch(self, goes_on: bool) -> None:
        """One dispatch of every engine, and an update where enough groups wait."""
        self._dispatches += 1
        for index, slots in enumerate(self._slots):
            engine, new = f'engine/{index}', [slot for slot, answer in enumerate(slots) if answer is None]
            for slot in new:
                slots[slot] = self._next()
            self._prefill(engine, [answer for slot in new if (answer := slots[slot])], 0)
            self._decode(engine, slots)
        self._time = round(self._time + 0.05, 6)
        if len(self._buffer) >= GROUPS:
            self._update(goes_on)

    def _prefill(self, engine: str, answers: list[Answer], rebuilt: int) -> None:
        if answers:
            self._work(engine, 'prefill', self._time, self._time + 0.01)
            requests = [answer.request for answer in answers]
            fields = {'bucket': 64, 'tokens': 5 * len(answers), 'rebuilt': rebuilt}
            self._add(self._time + 0.01, 'prefill', engine=engine, lane=engine, requests=requests, **fields)

    def _decode(self, engine: str, slots: list[Answer | None]) -> None:
        answers = [answer for answer in slots if answer]
        self._work(engine, 'decode', self._time + 0.01, self._time + 0.05)
        fields = {'dispatch': self._dispatches, 'slots': [a and a.request for a in slots], 'bucket': 8, 'steps': STEPS}
        tokens = {'tokens': STEPS * len(answers), 'version': self._version}
        self._add(self._time + 0.05, 'decode', engine=engine, lane=engine, **fields, **tokens)
        self._generated += STEPS * len(answers)
        for slot, answer in enumerate(slots):
            if answer is None:
                continue
            answer.tokens[self._version] += STEPS
            answer.left -= 1
            if not answer.left:
                slots[slot] = None
                self._finish(answer)
            elif answer.draw % 9 == 8 and not answer.preempted:
                answer.preempted, slots[slot] = True, None
                self._waiting.append(answer)
                done = sum(answer.tokens.values())
                self._add(self._time + 0.05, 'preempt', request=answer.request, engine=engine, tokens=done)

    def _finish(self, answer: Answer) -> None:
        now, total = self._time + 0.05, sum(answer.tokens.values())
        versions, lengths = map(list, zip(*sorted(answer.tokens.items()), strict=True))
        ended = {'draw': answer.draw, 'sample': 0}
        self._add(now, 'finish', **ended, tokens=total, reason='stop', versions=versions, lengths=lengths)
        self._add(now, 'reward', **ended, value=float(answer.draw % 3 == 0), label='ok', attempts=1)
        if answer.draw % 10 == 9:
            self._add(now, 'drop', draw=answer.draw, reason='over_age', detail='')
        else:
            self._add(now, 'buffer', draw=answer.draw, partial=False)
            self._buffer.append(answer)

    def _end(self, answer: Answer, reason: str) -> None:
        """What is unfinished when the run ends."""
        if answer not in self._buffer:
            versions = sorted(answer.tokens)
            lengths = [answer.tokens[version] for version in versions]
            total = {'tokens': sum(lengths), 'reason': reason, 'versions': versions, 'lengths': lengths}
            self._add(self._time, 'finish', draw=answer.draw, sample=0, **total)
        self._add(self._time, 'drop', draw=answer.draw, reason=reason, detail='')

    def _update(self, goes_on: bool) -> None:
        batch, self._buffer = sorted(self._buffer[:GROUPS], key=lambda a: a.draw), self._buffer[GROUPS:]
        step, now = len(self.lines) + 1, self._time
        self._add(now, 'consume', update=step, draws=[answer.draw for answer in batch])
        self._work('learner', 'train', now, now + 0.03)
        ages: collections.Counter[int] = collections.Counter()
        for answer in batch:
            ages.update({step - 1 - version: tokens for version, tokens in answer.tokens.items()})
        self.lines.append(metrics(step, [float(ages[age]) for age in range(max(ages) + 1)], now, self._generated))
        self._version = step
        self._add(now + 0.03, 'publish', version=step, manifest=f'm{step}')
        for index, slots in enumerate(self._slots):
            engine, running = f'engine/{index}', [answer for answer in slots if answer]
            change = {'requests': [a.request for a in running], 'from_version': step - 1, 'to_version': step}
            self._add(now + 0.03, 'interrupt', engine=engine, **change)
            self._time = now + 0.035
            if goes_on:
                self._prefill(engine, running, 5 * len(running))
            self._add(now + 0.045, 'load', engine=engine, version=step, pause_seconds=0.015)
        self._time = round(now + 0.05, 6)


def metrics(step: int, ages: list[float], time: float, generated: int) -> dict[str, Any]:
    """Of an update; curves that can be told apart."""
    tokens, swing = sum(ages), 1 + 0.3 * math.sin(step)
    mean = sum(age * count for age, count in enumerate(ages)) / tokens
    drift = 0.02 * swing * (1 + mean)
    values = {'mismatch': 0.003 * swing, 'drift': drift, 'inside': 0.0, 'total': drift + 0.003 * swing}
    split: dict[str, Any] = {
        'tokens': tokens,
        'left_ring_tokens': 1.0,
        'identity_error': 1e-9,
        'seconds': 0.01,
        'share': 0.1,
    }
    for part, rms in values.items():
        split |= {f'{part}_mean': rms / 3, f'{part}_rms': rms}
    for age in ('0', '1'):
        split |= {f'of_age/{age}/tokens': tokens / 2, f'of_age/{age}/drift_mean': 0.01, f'of_age/{age}/drift_rms': 0.02}
        split |= {f'of_age/{age}/mismatch_mean': 0.001, f'of_age/{age}/mismatch_rms': 0.003}
    split |= {'of_update/1/tokens': tokens, 'of_update/1/drift_mean': 0.01, 'of_update/1/drift_rms': drift}
    split |= {'of_engine/engine/0/tokens': tokens, 'of_engine/engine/0/mismatch_mean': 0.001}
    split['of_engine/engine/0/mismatch_rms'] = 0.003
    by_age = {'by_age/0/tokens': tokens, 'by_age/0/effective_sample_size': 0.9, 'by_age/0/clip_fraction': 0.1}
    return {
        'step': step, 'time': time, 'reward/mean': 0.6 - 0.5 / step**0.5, 'reward/std': 0.4 * swing,
        'reward/unparsed_rate': 0.1 / step, 'loss/value': 0.05 * math.cos(step), 'update/grad_norm': swing,
        'loss/clip_fraction': 0.05 * swing, 'loss/approx_kl': 0.01 * swing, 'loss/entropy': 2 / step**0.3,
        'loss/effective_sample_size': 0.9 / swing, 'loss/behavior_weight_mean': 1.0,
        'loss/behavior_weight_max': 2 * swing,
        'staleness/token_age_histogram': ages, 'staleness/token_age_mean': mean,
        'staleness/token_age_max': len(ages) - 1,
        'staleness/token_age_steps_mean': 2 * mean + 0.5, 'staleness/token_age_steps_max': 2 * len(ages) - 1,
        'staleness/steps_inside_update_mean': 0.5, 'staleness/steps_inside_update_max': 1.0,
        'ledger/trained_by_age': ages, 'ledger/filtered_by_age': [], 'ledger/masked_by_age': [],
        'ledger/unused_by_age': [],
        'mismatch/n': tokens, 'mismatch/mean_abs': 1e-6 * swing, 'mismatch/max_abs': 1e-5, 'mismatch/exact_share': 0.5,
        'throughput/generate_tokens_per_second': generated / time, 'throughput/train_tokens_per_second': 300 * swing,
        'publish/pause_seconds': 0.015 * swing, 'buffer/groups': 1 + step % 3, 'tokens/trained': tokens,
        'groups/trained': GROUPS, 'update/optimizer_steps': 2.0, 'update/skipped_steps': 0.0,
        'update/trained_trajectories': GROUPS, 'staleness/versions_per_trajectory_mean': 1.5,
        'staleness/versions_per_trajectory_max': 2, 'by_age/0/kl': 0.01, **by_age,
        **{f'ratio/{name}': value for name, value in split.items()},
    }  # fmt: skip


def write_busy_run(workdir: pathlib.Path, updates: int, **config: Any) -> None:
    """config.json, events.jsonl, metrics.jsonl and facts.json of the run; `config` with '__' for '.'."""
    workdir.mkdir(parents=True, exist_ok=True)
    values = default_config()
    values.run.steps = updates
    values.update_from_flattened_dict({name.replace('__', '.'): value for name, value in config.items()})
    (workdir / CONFIG).write_text(values.to_json_best_effort())
    run = BusyRun(updates)
    for name, lines in ((EVENTS, event_log(*run.entries)), (METRICS, run.lines)):
        (workdir / name).write_text(''.join(json.dumps(line) + '\n' for line in lines))
    two_facts(planned_steps=updates).save(workdir)


# Answers with everything that the page of tokens shows.


_WORDS = [
    b'', b'The', b' sum', b' of', b' 3', b' and', b' 8', b' is', b' 11', b'.', b'\n', b' So', b' we', b' add', b' 6',
    b' to', b' it', b',', b' which', b' gives', b' 17', b'\xf0\x9f\x98', b'\x80', b' step', b' by', b' carefully',
    b' \xe6\x95', b'\xb0',
]  # fmt: skip
_END, _SMILE, _NUMBER = 0, (21, 22), (26, 27)  # characters in two tokens
_TOOL = [10, 3, 4, 5, 6, 7, 8, 10]


def write_answers(workdir: pathlib.Path, updates: int, samples: int = 4) -> None:
    """One group of each update, of three versions; every third group was filtered."""
    split = TokenBytes(lambda token: _WORDS[token]).split
    writer = RolloutWriter(workdir, lambda tokens: split(tokens.tolist()), 'all')
    writer.start(0)
    rng = np.random.default_rng(0)
    for update in range(1, updates + 1):
        rows = [_draw_answer(rng, update, sample) for sample in range(samples)]
        arrays = [] if update % 3 == 0 else [_draw_arrays(rng, row) for row in rows]
        writer.put(update, [TrajectoryGroup(8 * update, tuple(rows))], [arrays])
    writer.close()


def _draw_answer(rng: np.random.Generator, update: int, sample: int) -> Trajectory:
    versions = [version for version in (update - 3, update - 2, update - 1) if version >= 0]
    segments = []
    for version in versions:
        tokens = [*rng.integers(1, 21, int(rng.integers(15, 60))).tolist(), *_SMILE, *_NUMBER]
        segments.append(segment(tokens, version, (-rng.exponential(0.5, len(tokens))).tolist()))
        if sample == 1:
            segments.append(segment(_TOOL, NOT_GENERATED))
    segments.append(segment([_END], versions[-1], [-0.1]))
    prompt = [1, 2, 3, 4, 5, 6, *_SMILE, 10]
    return trajectory(prompt, segments, draw=8 * update, sample=sample, reward=round(float(rng.random()), 2))


def _draw_arrays(rng: np.random.Generator, row: Trajectory) -> TokenArrays:
    """A token of the oldest version is masked; a veto takes a few out."""
    start = len(row.prompt.tokens)
    generated = row.loss_mask[start:]
    behavior = row.behavior_logprobs[start:][generated]
    count, advantage = len(behavior), row.reward - 0.5
    proximal = behavior + rng.normal(0, 0.2, count)
    change = rng.normal(0, 0.15, count)
    ratio = np.exp(change)
    mask = np.arange(count) >= 10
    above, below = (advantage > 0) & (ratio > 1.2), (advantage < 0) & (ratio < 0.8)
    return {
        'policy_logprobs': np.float32(proximal + change), 'advantages': np.full(count, advantage, np.float32),
        'loss_mask': mask, 'proximal_logprobs': np.float32(proximal), 'ratio': np.float32(ratio),
        'weight': np.float32(np.exp(proximal - behavior)), 'clip': np.int8(above * 1 - below * 1) * mask,
        'closed': mask & (rng.random(count) < 0.03),
    }  # fmt: skip


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('workdir', type=pathlib.Path)
    parser.add_argument('--updates', type=int, default=8)
    options = parser.parse_args()
    write_busy_run(options.workdir, options.updates)
    write_answers(options.workdir, min(options.updates, 30))
