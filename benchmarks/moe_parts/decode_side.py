"""A side of decode.py: the experts of decode steps in JAX, one step after the other in one program, on one core.

Arguments: way (of WAYS), sizes (of layer_case), rows of a step, core. `step` is the layer behind attention as the
kernels of decoding compute it, with attention that gives zeros: its norm changes nothing, and what else it does beside
the experts is next to nothing. The others are products of product_side.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.moe_parts.layer_case import draw_steps, pin, watch
from benchmarks.moe_parts.product_side import find_mixer, measure_square
from benchmarks.sides import Start, serve

WAYS = ('step', 'native', 'scan')
HEAD = 8  # of the attention that gives zeros


def prepare(arguments: dict[str, Any]) -> Start:
    pin(arguments)  # the pools of threads of jax have as many threads as the process has cores
    import jax
    import jax.numpy as jnp

    from areal_jax.native import compiled_library
    from areal_jax.native.compiled_library import keep_blocks

    keep_blocks()  # as an engine does
    compiled_library.register()
    sizes = arguments['sizes']
    inputs = jax.device_put(draw_steps(sizes, arguments['rows']))
    if arguments['way'] == 'step':
        weights, square = make_layer(sizes, inputs)
    else:
        measure = measure_square(find_mixer(arguments['way']), sizes['choices'])
        weights, square = inputs, lambda weights, x: measure({**weights, 'x': x})[0]
    run = jax.jit(lambda weights, steps: jnp.mean(jax.lax.map(lambda x: square(weights, x), steps)))

    def start() -> tuple[Callable[[], Mapping[str, float]], Callable[[], Mapping[str, Any]]]:
        compiled = run.lower(weights, inputs['x']).compile()
        call = lambda: float(compiled(weights, inputs['x']))
        call()
        return watch(call), lambda: {'versions': {'jax': jax.__version__}}

    return start


def make_layer(sizes: Mapping[str, int], inputs: Mapping[str, Any]) -> tuple[Any, Callable[..., Any]]:
    """(prepared weights of a layer, from weights and x [rows, d] to the mean square of what is added to x)."""
    import jax.numpy as jnp

    from areal_jax.models import native_layers
    from areal_jax.models.decoder import Decoder
    from areal_jax.models.families import ModelConfig
    from areal_jax.models.layer_parts import Experts

    config = ModelConfig(
        vocab_size=8, d_model=sizes['d'], n_layers=1, n_heads=1, n_kv_heads=1, head_dim=HEAD, d_ff=8, rope_theta=1e4,
        rms_eps=0.0, family='mixtral', experts=Experts(sizes['experts'], sizes['choices'], sizes['width']),
    )  # fmt: skip
    decoder = Decoder(config, tokens='native_columns')
    params = decoder.init(0)
    layer = params['layers']['0']
    layer['mlp'] = {
        'router': {'weight': inputs['router']},
        'experts': {name: inputs[name] for name in ('gate', 'up', 'down')},
    }

    def square(weights: Any, x: Any) -> Any:
        rotation = (jnp.zeros((len(x), HEAD // 2)),) * 2
        # queries, keys and values that nobody reads are left out
        attend = lambda q, k, v: (jnp.zeros((len(x), 1, HEAD)), None)
        out, _, _ = native_layers.run_layer(config, weights, x.T, rotation, attend, jnp.int32(len(x)))
        return jnp.square(out - x.T).mean()

    return decoder.prepare(params)['layers']['0'], square


if __name__ == '__main__':
    serve(prepare)
