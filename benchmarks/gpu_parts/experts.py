"""Experts of Qwen3-30B-A3B: the products of one layer, and an update of four layers, on 16,384 tokens in bfloat16.

python -m benchmarks.gpu_parts.experts [--tiny] OUT
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp

from areal_jax.models.expert_check import Demand, choose_checked_mixer
from areal_jax.models.families import ModelConfig
from areal_jax.models.layer_parts import Experts
from benchmarks.gpu_parts.cells import Cells, device_memory, measure_time, run_part
from benchmarks.gpu_parts.shapes import TINY, TrainCase, find_peak, train_case
from benchmarks.gpu_parts.train import SEED, Training

# Qwen/Qwen3-30B-A3B, config.json, with 4 of its 48 layers
MODEL = ModelConfig(
    vocab_size=151_936,
    d_model=2048,
    n_layers=4,
    n_heads=32,
    n_kv_heads=4,
    head_dim=128,
    d_ff=6144,
    rope_theta=1e6,
    rms_eps=1e-6,
    tie_embeddings=False,
    context_tokens=40_960,
    family='qwen3_moe',
    qk_norm=True,
    experts=Experts(count=128, per_token=8, d_expert=768),
)
TINY_MODEL = dataclasses.replace(
    MODEL, vocab_size=TINY.vocab_size, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=96,
    context_tokens=256, experts=Experts(count=4, per_token=2, d_expert=32),
)  # fmt: skip
_REPEATS = 5


def measure(cells: Cells, *, tiny: bool) -> None:
    dense = train_case('1.5b', tiny)
    case = dataclasses.replace(dense, model=TINY_MODEL if tiny else MODEL)
    cells.attempt('layer', lambda: _time_layer(case))
    cells.attempt('update', lambda: _time_update(case))


def _time_layer(case: TrainCase) -> dict[str, Any]:
    """The products of a layer, forward and all gradients, by the mixer that its check chooses."""
    model, tokens = case.model, case.row_tokens
    experts = model.experts
    assert experts is not None
    demand = Demand('bfloat16', experts.per_token, experts.count, experts.d_expert, model.d_model)
    began = time.perf_counter()
    chosen = choose_checked_mixer(jax.local_devices()[0], demand)
    check_s = time.perf_counter() - began
    keys = jax.random.split(jax.random.key(SEED), 6)
    draw = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16) / shape[-2] ** 0.5
    row, into = (tokens, model.d_model), (experts.count, model.d_model, experts.d_expert)
    _, routes = jax.lax.top_k(jax.random.uniform(keys[0], (tokens, experts.count)), experts.per_token)
    weights = jnp.full(routes.shape, 1 / experts.per_token, jnp.float32)
    down = draw(keys[4], into[0], into[2], into[1])
    inputs = (draw(keys[1], *row), weights, draw(keys[2], *into), draw(keys[3], *into), down)

    @jax.jit
    def both(d_out: jax.Array, *inputs: jax.Array) -> Any:
        out, pull = jax.vjp(lambda x, *rest: chosen.mix(x, routes, *rest), *inputs)
        return out, pull(d_out)

    timing = measure_time(lambda: both(draw(keys[5], *row), *inputs), _REPEATS)
    flops = 18.0 * tokens * experts.per_token * model.d_model * experts.d_expert
    peak = find_peak(jax.local_devices()[0].device_kind)
    utilisation = peak and flops / timing['median_s'] / peak.bfloat16_flops
    found = {'mixer': chosen.name, 'faults': list(chosen.faults), 'check_s': check_s}
    return {**timing, **found, 'flops': flops, 'mfu': utilisation, 'memory': device_memory()}


def _time_update(case: TrainCase) -> dict[str, Any]:
    train = Training(case, 'full')
    began = time.perf_counter()
    train.learner.warm_up()
    compile_s = time.perf_counter() - began
    timing = measure_time(train.update, _REPEATS)
    flops, peak = train.describe()['flops'], find_peak(jax.local_devices()[0].device_kind)
    return {
        **timing,
        'compile_s': compile_s,
        'parameters': train.describe()['parameters'],
        'tokens_per_second': sum(train.lengths) / timing['median_s'],
        'mfu': peak and flops / timing['median_s'] / peak.bfloat16_flops,
        'memory': device_memory(),
    }


if __name__ == '__main__':
    run_part(measure)
