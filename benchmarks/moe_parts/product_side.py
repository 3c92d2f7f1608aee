"""A side of product.py: the layer in JAX, with one of our mixers or a baseline, on one core.

Arguments: mixer (of MIXERS), sizes (of layer_case), pass ('forward', or 'gradient': forward and the gradient of the
mean square of y for x and all weights), core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.moe_parts.layer_case import GRADIENT, draw, pin, watch
from benchmarks.sides import Start, serve

MIXERS = ('native', 'blocks', 'scan', 'ragged')


def prepare(arguments: dict[str, Any]) -> Start:
    pin(arguments)  # the pools of threads of jax have as many threads as the process has cores
    import jax

    from areal_jax.native import compiled_library
    from areal_jax.native.compiled_library import keep_blocks

    keep_blocks()  # as a learner does
    if arguments['mixer'] == 'native':
        compiled_library.register()
    sizes = arguments['sizes']
    inputs = jax.device_put(draw(sizes))
    measure = measure_square(find_mixer(arguments['mixer']), sizes['choices'])
    run = jax.jit(jax.value_and_grad(measure, has_aux=True) if arguments['pass'] == GRADIENT else measure)

    def start() -> tuple[Callable[[], Mapping[str, float]], Callable[[], Mapping[str, Any]]]:
        compiled = run.lower(inputs).compile()

        def call() -> float:
            results = jax.block_until_ready(compiled(inputs))
            return float(results[0][0] if arguments['pass'] == GRADIENT else results[0])

        call()
        memory = compiled.memory_analysis().temp_size_in_bytes + _kept_bytes(arguments)
        return watch(call), lambda: {'temp_bytes': memory, 'versions': {'jax': jax.__version__}}

    return start


def _kept_bytes(arguments: Mapping[str, Any]) -> int:
    """What the kernels keep beside the memory of XLA: the products of all rows with down (AddMix)."""
    sizes = arguments['sizes']
    return 4 * sizes['tokens'] * sizes['choices'] * sizes['d'] if arguments['mixer'] == 'native' else 0


def measure_square(mix: Callable[..., Any], choices: int) -> Callable[..., Any]:
    """From inputs to (mean square of y, y)."""
    import jax
    import jax.numpy as jnp

    def measure(inputs: Mapping[str, Any]) -> tuple[Any, Any]:
        scores = jax.nn.softmax(inputs['x'] @ inputs['router'])
        chosen, experts = jax.lax.top_k(scores, choices)
        weights = chosen / chosen.sum(axis=1, keepdims=True)
        y = mix(inputs['x'], experts, weights, inputs['gate'], inputs['up'], inputs['down'])
        return jnp.square(y).mean(), y

    return measure


def find_mixer(name: str) -> Callable[..., Any]:
    import functools

    import jax

    from areal_jax.models.expert_products import mix_blocks, mix_grouped, mix_native

    others = {'scan': mix_scanned, 'ragged': functools.partial(mix_grouped, jax.lax.ragged_dot)}
    return ({'native': mix_native, 'blocks': mix_blocks} | others)[name]


def mix_scanned(x: Any, experts: Any, weights: Any, *matrices: Any) -> Any:
    """Every expert for every token, one expert after the other."""
    import jax
    import jax.numpy as jnp

    def add(y: Any, one: Any) -> tuple[Any, None]:
        number, gate, up, down = one
        weight = jnp.where(experts == number, weights, 0).sum(axis=1)
        return y + weight[:, None] * ((jax.nn.silu(x @ gate) * (x @ up)) @ down), None

    numbers = jnp.arange(len(matrices[0]))
    y, _ = jax.lax.scan(add, jnp.zeros_like(x), (numbers, *matrices))
    return y


if __name__ == '__main__':
    serve(prepare)
