"""Decoding in 8 bits against float32 on a CPU: what a step costs, and how far the policy moves.

    python -m benchmarks.quantized --out=benchmarks/results/quantized.json

SmolLM2-135M as configs/arithmetic.py loads it. Row 'step': dispatches of 1, 8 and 32 rows at position 60 through the
decode backend, sampling included, float32 and int8 by turns; milliseconds of a step. Row 'prepare': the form for
decoding of a version, from the published weights. Row 'mismatch': answers of 16 tokens to its held-out prompts, sampled
by the int8 backend; |log-prob of a policy - log-prob of the published weights| over their tokens, for the policy with
everything in 8 bits and for policies with a part left in float32. Those parts are computed in float32 from numbers that
were rounded to 8 bits, which is the same but for the rounding of sums.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from areal_jax.app.command_line import load_config
from areal_jax.app.model.model import Model, build_model
from areal_jax.app.parts.task_builder import build_task
from areal_jax.config import TrackedConfig
from areal_jax.rollout.backend import DecodeRow, PrefillPiece
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend, PreparedWeights
from areal_jax.types import GenerationRequest, SamplingParams
from benchmarks.options import Row, make_parser, report, run, show
from benchmarks.quantized_parts import mismatches
from benchmarks.ratios import CLOCKS, Bar, Run, compare
from benchmarks.sides import ARITHMETIC

CONTEXT, STEPS, POSITION, ANSWER = 80, 8, 60, 16
BARS = {1: Bar(1.8, at_least=True), 8: Bar(1.8, at_least=True), 32: Bar(1.5, at_least=True)}
FORMS = ('published', 'int8')


def make_backend(model: Model, weights: str, rows: int) -> JaxDecodeBackend:
    return JaxDecodeBackend(
        model.decoder, slots=rows, context_tokens=CONTEXT, block_tokens=CONTEXT, prefill_buckets=(512,),
        decode_steps=STEPS, batch_buckets=(rows,), filtered=False, dtype='float32', weights=weights,
    )  # fmt: skip


def request_of(prompt: np.ndarray, draw: int) -> GenerationRequest:
    return GenerationRequest(draw, 0, 0, np.asarray(prompt, np.int32), SamplingParams(ANSWER, 1.0, 0, 1.0, ()))


def timed(work: Callable[[], object], repeats: int) -> Run:
    """Seconds of so many calls, each a dispatch of STEPS tokens a row."""
    cpu, wall = time.process_time(), time.monotonic()
    for _ in range(repeats):
        work()
    seconds = {'cpu_s': time.process_time() - cpu, 'wall_s': time.monotonic() - wall}
    return seconds | {'checks': {'tokens': repeats * STEPS}}


def dispatches(backend: JaxDecodeBackend, weights: PreparedWeights, rows: int) -> Callable[[], None]:
    """A dispatch of rows at POSITION, again and again."""
    prompt = np.full(POSITION + 1, 100, np.int32)
    decoded = [DecodeRow(request_of(prompt, row), 100, POSITION, CONTEXT, (row,)) for row in range(rows)]
    state = backend.initial_state()

    def work() -> None:
        nonlocal state
        state, _ = backend.generate(weights, state, decoded, STEPS)

    work()
    return work


def measure_steps(model: Model, options: argparse.Namespace) -> Iterator[Row]:
    prepared = {form: make_backend(model, form, 1).prepare(model.params) for form in FORMS}
    for rows, bar in BARS.items():
        works = {form: dispatches(make_backend(model, form, rows), prepared[form], rows) for form in FORMS}
        calls: dict[str, list[Run]] = {form: [] for form in FORMS}
        for _ in range(options.turns):
            for form, work in works.items():
                calls[form].append(timed(work, max(1, options.repeats // rows)))
        milliseconds = {
            f'{form}_ms_{clock.removesuffix("_s")}': [quartile(calls[form], clock, share) for share in (25, 50, 75)]
            for form in FORMS
            for clock in CLOCKS
        }
        found = compare(calls['int8'], {'published': calls['published']}, bar, ('cpu_s',))
        yield {'row': 'step', 'rows': rows, **milliseconds, 'bar': bar.value, **found, 'calls': calls}


def quartile(calls: Sequence[Run], clock: str, share: int) -> float:
    """Of the milliseconds of a step."""
    return float(np.percentile([1e3 * call[clock] / call['checks']['tokens'] for call in calls], share))


def measure_preparation(model: Model, options: argparse.Namespace) -> Iterator[Row]:
    for form in FORMS:
        backend = make_backend(model, form, 1)
        calls = [timed(lambda: backend.prepare(model.params), 1) for _ in range(options.turns)]
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(backend.prepare(model.params)))
        seconds = {clock: statistics.median(call[clock] for call in calls) for clock in CLOCKS}
        yield {'row': 'prepare', 'weights': form, **seconds, 'bytes': size}


def sample_answers(model: Model, prompts: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(prompt and answer, the answer's log-probs) of each, from the int8 backend, one after the other."""
    backend, found = make_backend(model, 'int8', 1), []
    weights, state = backend.prepare(model.params), backend.initial_state()
    for draw, prompt in enumerate(prompts):
        tokens, logprobs = prompt.tolist(), []
        state = backend.prefill(weights, state, [PrefillPiece(prompt[:-1], 0, (0,))])
        while len(logprobs) < ANSWER:
            row = DecodeRow(request_of(prompt, draw), tokens[-1], len(tokens) - 1, len(prompt) + ANSWER, (0,))
            state, output = backend.generate(weights, state, [row], min(STEPS, ANSWER - len(logprobs)))
            tokens += output.tokens[:, 0].tolist()
            logprobs += output.logprobs[:, 0].tolist()
        found.append((np.array(tokens, np.int32), np.array(logprobs)))
    return found


def measure_mismatch(model: Model, prompts: Sequence[np.ndarray]) -> Iterator[Row]:
    answers = sample_answers(model, prompts)
    for policy, values in mismatches(model, answers, CONTEXT).items():
        size = np.exp(-values).sum() ** 2 / (len(values) * np.exp(-2 * values).sum())
        yield {
            'row': 'mismatch', 'policy': policy, 'tokens': len(values), 'mean_abs': float(np.abs(values).mean()),
            'rms': float(np.sqrt(np.mean(values**2))), 'max_abs': float(np.abs(values).max()),
            **({'kl': float(np.mean(np.expm1(-values) + values)), 'effective_sample_size': float(size)}
               if policy == 'engine' else {}),
        }  # fmt: skip


def measure(options: argparse.Namespace) -> list[Row]:
    config = TrackedConfig(load_config(ARITHMETIC))
    model = build_model(config)
    model.params = jax.device_put(model.params, jax.local_devices()[0])
    prompts = [prompt.tokens for prompt in build_task(config, model.tokenizer).held_out(options.prompts, options.seed)]
    rows = []
    for part in (
        measure_steps(model, options), measure_preparation(model, options), measure_mismatch(model, prompts),
    ):  # fmt: skip
        for row in part:
            rows.append(row)
            show(row)
    return rows


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, turns=9)
    parser.add_argument('--prompts', type=int, default=32, help='of the row mismatch')
    parser.add_argument('--repeats', type=int, default=8, help='dispatches of one row in a turn; 8 rows: an eighth')
    options = parser.parse_args(arguments)
    if options.small:
        options.turns, options.prompts, options.repeats = 1, 2, 1
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where every bar is met, 2 where one is missed."""
    options = read_options(arguments)
    rows = report('quantized', arguments, options, lambda: measure(options))['rows']
    return 0 if all(row.get('met', True) for row in rows) else 2


if __name__ == '__main__':
    run('quantized', lambda: sys.exit(main()))
