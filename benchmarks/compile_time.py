"""What depth costs the compiler: a stacked decoder of 32 layers against one of 2, and the list form beside it.

    python -m benchmarks.compile_time --out=benchmarks/results/compile_time.json

Programs: forward and backward of packed rows, and the same with an AdamW step; only compiled, never run. Each is traced
and compiled anew in every round, in turns, with the persistent cache off; the first round is thrown away. Ratios are of
medians. Equations (of the traced program) and instructions (of the compiled one) do not depend on the machine's load.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import optax

from areal_jax.learning.forward import forward
from areal_jax.models.decoder import Decoder
from areal_jax.models.shape import ModelConfig
from benchmarks.report import write_report

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
    """Of a traced program, those of its loops and calls included, each counted once."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=pathlib.Path)
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--forms', default=','.join(FORMS))
    parser.add_argument('--width', type=int, default=512)
    parser.add_argument('--tokens', type=int, default=1024)
    parser.add_argument('--remat', default='attention')
    parser.add_argument('--attention', default='auto')
    options = parser.parse_args()
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
