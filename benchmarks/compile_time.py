"""What depth costs the compiler: a stacked decoder of 32 layers against one of 2, and the list form beside it.

    python -m benchmarks.compile_time --out=benchmarks/results/compile_time.json

Programs: forward and backward of packed rows, and the same with an AdamW step; only compiled, never run. Each is traced
and compiled anew in every round, in turns, with the persistent cache off; the first round is thrown away. Ratios are of
medians. Equations (of the traced program) and instructions (of the compiled one) do not depend on the machine's load.

    python -m benchmarks.compile_time --start=.,../other --rounds=3 --out=benchmarks/results/start.json

measures instead the start of configs/arithmetic.py (SmolLM2-135M-Instruct) in each of these checkouts, in turns: from
the start of the process to its first 'decode' event, and when each part that it announces began. Ratios are to the
first checkout, of each turn. With --cached every checkout finds its programs in a cache that one run before has filled.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import optax
import psutil

from areal_jax.learning.forward import forward
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from benchmarks.ratios import spread
from benchmarks.report import write_report
from benchmarks.sides import ARITHMETIC, QUICKSTART

LAYER_NUMBERS = (2, 32)
FORMS = ('stacked', 'list')
PROGRAMS = ('gradient', 'adamw step')


def model(n_layers: int, width: int, form: str, remat: str) -> Decoder:
    heads = width // 64
    config = ModelConfig(
        vocab_size=8 * width, d_model=width, n_layers=n_layers, n_heads=heads, n_kv_heads=heads // 2, head_dim=64,
        d_ff=3 * width, rope_theta=1e6, family='qwen2', qkv_bias=True,
    )  # fmt: skip
    return Decoder(config, layers=form, remat=remat)


def program(decoder: Decoder, name: str, tokens: int, attention: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function to compile and the shapes of its arguments."""
    names = ('tokens', 'positions', 'segment_ids', 'parent_ids', 'sources', 'targets')
    rows = {name: jax.ShapeDtypeStruct((1, tokens), jnp.int32) for name in names}
    params = decoder.abstract()
    optimizer = optax.adamw(1e-3)

    def loss(params: Any, rows: Any) -> jax.Array:
        return -jnp.sum(forward(decoder, params, rows, 1.0, attention=attention)[0])

    def step(params: Any, state: Any, rows: Any) -> tuple[Any, ...]:
        value, gradient = jax.value_and_grad(loss)(params, rows)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    if name == 'gradient':
        return jax.value_and_grad(loss), (params, rows)
    return step, (params, jax.eval_shape(optimizer.init, params), rows)


def equations(jaxpr: Any) -> int:
    """Of a traced program, including its loops and calls, each counted once."""
    inner = (sub for equation in jaxpr.eqns for sub in jax.extend.core.jaxprs_in_params(equation.params))
    return len(jaxpr.eqns) + sum(map(equations, inner))


def measure(function: Callable[..., Any], arguments: tuple[Any, ...]) -> dict[str, float]:
    jax.clear_caches()
    wall, cpu = time.monotonic(), time.process_time()
    traced = jax.jit(function).trace(*arguments)
    lowered = traced.lower()
    lowered_wall = time.monotonic()
    compiled = lowered.compile()
    return {
        'wall_s': time.monotonic() - wall,
        'cpu_s': time.process_time() - cpu,
        'trace_s': lowered_wall - wall,
        'compile_s': time.monotonic() - lowered_wall,
        'equations': equations(traced.jaxpr.jaxpr),
        'instructions': compiled.as_text().count(' = '),
    }


def summarize(runs: list[dict[str, float]]) -> dict[str, Any]:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]} | {'runs': runs}


def measure_start(checkout: pathlib.Path, config: str, cache: pathlib.Path | None) -> dict[str, Any]:
    """Seconds of a run in `checkout` from its start to its first decode, {'wall_s', 'cpu_s', 'parts'}.

    'parts': (line that announces a part, wall and CPU seconds when it came). Without `cache` the compilation cache is
    off.
    """
    environment = {name: value for name, value in os.environ.items() if name != 'JAX_COMPILATION_CACHE_DIR'}
    if cache is not None:
        environment['JAX_COMPILATION_CACHE_DIR'] = str(cache)
    if not (checkout / config).exists():
        config = QUICKSTART
    with tempfile.TemporaryDirectory() as workdir:
        command = [sys.executable, '-m', 'areal_jax.main_train', f'--config={config}', f'--workdir={workdir}']
        began = time.monotonic()
        run = psutil.Popen(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True)
        now = lambda: (time.monotonic() - began, sum(run.cpu_times()[:2]))
        parts: list[tuple[str, float, float]] = []

        def note() -> None:
            for line in run.stdout:  # a part that takes long is announced again, with its seconds
                if not line.endswith(' s)\n'):
                    parts.append((line.strip(), *now()))

        reader = threading.Thread(target=note)
        reader.start()
        events = pathlib.Path(workdir, 'events.jsonl')
        try:
            while not (events.exists() and '"decode"' in events.read_text()):
                if run.poll() is not None:
                    raise RuntimeError(f'the run in {checkout} ended with {run.returncode} before it decoded: {parts}')
                time.sleep(0.02)
            wall, cpu = now()
        finally:
            run.kill()
            run.wait()
            reader.join()
    return {'wall_s': wall, 'cpu_s': cpu, 'parts': parts}


def compare_starts(checkouts: list[pathlib.Path], config: str, rounds: int, cached: bool) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {str(checkout): [] for checkout in checkouts}
    with tempfile.TemporaryDirectory() as scratch:
        caches = [pathlib.Path(scratch, str(number)) if cached else None for number in range(len(checkouts))]
        for turn in range(rounds + cached):
            for checkout, cache in zip(checkouts, caches, strict=True):
                run = measure_start(checkout, config, cache)
                print(checkout, run, file=sys.stderr, flush=True)
                if turn >= cached:  # the first one fills the cache
                    runs[str(checkout)].append(run)
    first = runs[str(checkouts[0])]
    return {name: _summarize_starts(found, first) for name, found in runs.items()}


def _summarize_starts(runs: list[dict[str, Any]], first: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians, and over turns the ratios to the runs of the first checkout: median and quartiles."""
    keys = ('wall_s', 'cpu_s')
    ratios = {key: [run[key] / other[key] for run, other in zip(runs, first, strict=True)] for key in keys}
    return (
        {key: statistics.median(run[key] for run in runs) for key in keys}
        | {f'ratio_{key}': spread(values) for key, values in ratios.items()}
        | {'runs': runs}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=pathlib.Path)
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--forms', default=','.join(FORMS))
    parser.add_argument('--width', type=int, default=512)
    parser.add_argument('--tokens', type=int, default=1024)
    parser.add_argument('--remat', default='attention')
    parser.add_argument('--attention', default='auto')
    parser.add_argument('--start', help='checkouts, separated by commas: measure the start of a run in each')
    parser.add_argument('--config', default=ARITHMETIC, help='of that run')
    parser.add_argument('--cached', action='store_true', help='with a compilation cache that a run before has filled')
    options = parser.parse_args()
    if options.start:
        checkouts = [pathlib.Path(name) for name in options.start.split(',')]
        write_report({'start': compare_starts(checkouts, options.config, options.rounds, options.cached)}, options.out)
        return
    jax.config.update('jax_enable_compilation_cache', False)
    cases = [(form, name, n) for form in options.forms.split(',') for name in PROGRAMS for n in LAYER_NUMBERS]
    runs: dict[tuple[str, str, int], list[dict[str, float]]] = {case: [] for case in cases}
    for turn in range(options.rounds + 1):
        for form, name, n in cases:
            decoder = model(n, options.width, form, options.remat)
            run = measure(*program(decoder, name, options.tokens, options.attention))
            print(form, name, n, run, file=sys.stderr, flush=True)
            if turn:
                runs[form, name, n].append(run)
    results = {f'{form}, {name}, {n} layers': summarize(runs[form, name, n]) for form, name, n in cases}
    few, many = LAYER_NUMBERS
    ratios = {
        f'{form}, {name}': {
            key: results[f'{form}, {name}, {many} layers'][key] / results[f'{form}, {name}, {few} layers'][key]
            for key in ('wall_s', 'cpu_s', 'trace_s', 'compile_s', 'equations', 'instructions')
        }
        for form, name, n in cases
        if n == few
    }
    shape = {name: getattr(options, name) for name in ('width', 'tokens', 'remat', 'attention', 'rounds')}
    numbers = {f'{many}_over_{few}_layers': ratios, **results, 'shape': shape}
    write_report(numbers, options.out)


if __name__ == '__main__':
    main()
