"""token_logprobs against all logits at once: forward and backward, float32, the same hidden states and head.

    python -m benchmarks.logprobs --out=benchmarks/results/logprobs.json

Both programs are compiled first and take turns in one process; the first call of each is thrown away. Temporary memory
is what the compiler reserves for a program besides its arguments and results. Ratios are of medians.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.models.logprobs import token_logprobs
from benchmarks.report import write_report


def naive(hidden: jax.Array, head: jax.Array, targets: jax.Array, temperature: float) -> tuple[jax.Array, jax.Array]:
    log_p = jax.nn.log_softmax(hidden @ head.T / temperature)
    return jnp.take_along_axis(log_p, targets[:, None], axis=1)[:, 0], -jnp.sum(jnp.exp(log_p) * log_p, axis=1)


def gradients(compute, entropy: float):
    """Of a weighted sum over tokens; `entropy` is the coefficient of the second result, 0 = unused."""

    def loss(hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        values = compute(hidden, head, targets, 0.9)
        return jnp.sum(weights * (values[0] + entropy * values[1] if entropy else values[0]))

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def timed(program, arguments) -> dict[str, float]:
    wall, cpu = time.monotonic(), time.process_time()
    jax.block_until_ready(program(*arguments))
    return {'wall_s': time.monotonic() - wall, 'cpu_s': time.process_time() - cpu}


def compare(arguments, entropy: float, chunk: int | None, rounds: int) -> dict:
    sides = {'ours': lambda *x: token_logprobs(*x, chunk=chunk), 'naive': naive}
    programs = {name: gradients(compute, entropy).lower(*arguments).compile() for name, compute in sides.items()}
    results = {name: program(*arguments) for name, program in programs.items()}
    differences = [
        float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))
        for a, b in zip(*(jax.tree.leaves(results[name]) for name in sides), strict=True)
    ]
    del results
    runs: dict[str, list] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, program in programs.items():
            runs[name].append(timed(program, arguments))
        print({name: r[-1] for name, r in runs.items()}, file=sys.stderr, flush=True)
    summary = {
        name: {key: statistics.median(r[key] for r in runs[name]) for key in ('wall_s', 'cpu_s')}
        | {'temporary_mb': programs[name].memory_analysis().temp_size_in_bytes / 2**20, 'runs': runs[name]}
        for name in sides
    }
    ours, theirs = summary['ours'], summary['naive']
    return {
        'naive_over_ours_temporary_memory': theirs['temporary_mb'] / ours['temporary_mb'],
        'ours_over_naive_wall': ours['wall_s'] / theirs['wall_s'],
        'ours_over_naive_cpu': ours['cpu_s'] / theirs['cpu_s'],
        'relative_difference_loss_d_hidden_d_head': differences,
        **summary,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=pathlib.Path)
    parser.add_argument('--tokens', type=int, default=4096)
    parser.add_argument('--vocabulary', type=int, default=32768)
    parser.add_argument('--width', type=int, default=512)
    parser.add_argument('--chunk', type=int, help='columns of a tile; default: what token_logprobs chooses')
    parser.add_argument('--rounds', type=int, default=7)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    arguments = jax.device_put(
        (
            rng.normal(size=(options.tokens, options.width)).astype(np.float32),
            (rng.normal(size=(options.vocabulary, options.width)) / options.width**0.5).astype(np.float32),
            rng.integers(0, options.vocabulary, options.tokens).astype(np.int32),
            rng.normal(size=options.tokens).astype(np.float32),
        )
    )
    numbers = {
        name: compare(arguments, entropy, options.chunk, options.rounds)
        for name, entropy in (('logprobs', 0.0), ('logprobs and entropy', 0.01))
    }
    shape = {name: getattr(options, name) for name in ('tokens', 'vocabulary', 'width', 'chunk', 'rounds')}
    numbers |= {'shape': shape}
    write_report(numbers, options.out)


if __name__ == '__main__':
    main()
