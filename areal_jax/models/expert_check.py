"""The check of a mixture of experts at start-up, for the device and in the dtype of the run.

Kernels of accelerators differ by version and device: one has given an expert without tokens a gradient, and rows
without an expert may hold anything. So their results are compared with plain JAX before they are used. What is right
may still be dense: compilers have computed grouped products as masked copies of all rows, one for each expert. So the
products are also compiled for the experts of the run, and what that needs is compared with what the formula needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from areal_jax.models.attention.backends import is_attached
from areal_jax.models.expert_products import Mixer, mix_blocks, mixers_for
from areal_jax.models.grouped.products import Hardware

_TOKENS, _CHOICES, _EXPERTS, _WIDTH, _EXPERT_WIDTH = 96, 2, 6, 128, 64
_UNUSED, _NONE_SHARE = 4, 0.2  # an expert that no token chooses, and the share of choices without an expert
# largest error relative to the largest value: wrong rows give 0.1, and accelerators multiply float32 with fewer bits
_ALLOWED = {'float32': 2e-2, 'bfloat16': 4e-2, 'float16': 2e-2}
_NAMES = ('output', 'gradient of x', 'gradient of weights', 'gradient of gate', 'gradient of up', 'gradient of down')
_CHOICES_EACH = 1024  # of an expert, in the products whose bytes and operations are counted
_ALLOWED_OPERATIONS = 1.2  # of those that the formula needs
_ALLOWED_BYTES = 5  # of a row of x and a row of the experts' width, for each choice


class Demand(NamedTuple):
    """The experts of a layer, on one device."""

    dtype: str
    per_token: int
    experts: int
    width: int
    d: int


class Chosen(NamedTuple):
    """The mixer to use, and why faster ones were rejected."""

    name: str
    mix: Mixer
    faults: tuple[str, ...]


def choose_checked_mixer(device: jax.Device, demand: Demand) -> Chosen:
    """The fastest mixer that passes its check; on a device that is only described, the fastest one, not checked."""
    faults: list[str] = []
    mixers = mixers_for(Hardware.of(device), demand.dtype, (demand.d, demand.width))
    for name, mix in mixers.items():
        if device.platform == 'cpu' or mix is mix_blocks or not is_attached(device):
            break  # the tests compare the mixers of CPUs, and plain JAX is what others are compared with
        if not (fault := find_fault(mix, device, demand)):
            break
        faults.append(f'{name}, the products of experts, {fault}; {list(mixers)[len(faults) + 1]} is tried')
    return Chosen(name, mix, tuple(faults))


def find_fault(mix: Mixer, device: jax.Device, demand: Demand) -> str:
    """What is wrong with a mixer on a device of this process: it does not run, is wrong or is dense; '' = nothing."""
    try:
        wrong = _find_wrong_value(mix, device, demand.dtype)
        return wrong or find_waste(measure_cost(mix, device, demand), demand)
    except Exception as error:  # kernels of accelerators fail in many ways
        return f'do not run here: {error or type(error).__name__}'


def _find_wrong_value(mix: Mixer, device: jax.Device, dtype: str) -> str:
    with jax.default_device(device):
        found, expected = jax.device_get((_differentiate(mix, dtype), _differentiate(mix_blocks, dtype)))
    allowed = _ALLOWED[dtype]
    for name, value, reference in zip(_NAMES, found, expected, strict=True):
        value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
        off = float(np.abs(value - reference).max() / np.abs(reference).max())
        if not off <= allowed:  # NaN fails too
            return (
                f'fail their check: {name} is off by {off:.2g} of its largest value in {dtype}, allowed are {allowed:g}'
            )
        if name in _NAMES[3:] and value[_UNUSED].any():
            return f'fail their check: {name} is not 0 for an unused expert'
    return ''


def _differentiate(mix: Mixer, dtype: str) -> tuple[jax.Array, ...]:
    """The output and the gradients that _NAMES names."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), dtype)
    used = np.delete(np.arange(_EXPERTS), _UNUSED)
    experts = np.array([rng.choice(used, _CHOICES, replace=False) for _ in range(_TOKENS)], np.int32)
    experts[rng.random(experts.shape) < _NONE_SHARE] = _EXPERTS
    weights = jnp.asarray(rng.random(experts.shape), jnp.float32)
    into, out_of = (_EXPERTS, _WIDTH, _EXPERT_WIDTH), (_EXPERTS, _EXPERT_WIDTH, _WIDTH)
    inputs = (normal(_TOKENS, _WIDTH), weights, normal(*into), normal(*into), normal(*out_of))
    return jax.jit(_with_gradients(mix))(jnp.asarray(experts), normal(_TOKENS, _WIDTH), *inputs)


def _with_gradients(mix: Mixer) -> Callable[..., tuple[jax.Array, ...]]:
    def run(experts: jax.Array, dy: jax.Array, *inputs: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(lambda x, *rest: mix(x, experts, *rest), *inputs)
        return out, *pull(dy)

    return run


class Cost(NamedTuple):
    """What a compiled layer of experts needs, with all gradients."""

    tokens: int
    temporaries: int  # bytes
    operations: float  # 0 = the compiler does not count them; those of a kernel are as the kernel says
    needed: float  # operations of the formula


def measure_cost(mix: Mixer, device: jax.Device, demand: Demand) -> Cost:
    """Compiles a layer, forward and gradient, for a device that may be only described."""
    tokens = -(-_CHOICES_EACH * demand.experts // demand.per_token)
    at = SingleDeviceSharding(device)
    describe = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=at)
    row, each = (tokens, demand.d), (tokens, demand.per_token)
    into, out_of = (demand.experts, demand.d, demand.width), (demand.experts, demand.width, demand.d)
    described = [
        describe('int32', *each), describe(demand.dtype, *row), describe(demand.dtype, *row),
        describe('float32', *each), *(describe(demand.dtype, *shape) for shape in (into, into, out_of)),
    ]  # fmt: skip
    compiled = jax.jit(_with_gradients(mix)).lower(*described).compile()
    operations = (compiled.cost_analysis() or {}).get('flops', 0.0)
    needed = 18.0 * tokens * demand.per_token * demand.d * demand.width  # three products, three times, two each
    memory = compiled.memory_analysis()
    return Cost(tokens, memory.temp_size_in_bytes if memory else 0, operations, needed)


def find_waste(cost: Cost, demand: Demand) -> str:
    """What is too much in a cost: temporaries or arithmetic; '' = nothing."""
    allowed = _ALLOWED_BYTES * cost.tokens * demand.per_token * (demand.d + demand.width)
    allowed *= jnp.dtype(demand.dtype).itemsize
    case = f'for {cost.tokens:,} tokens and {demand.experts} experts'
    if cost.temporaries > allowed:
        return f'need {cost.temporaries / 1e9:.3g} GB of temporaries {case}, allowed are {allowed / 1e9:.3g}'
    if cost.operations > _ALLOWED_OPERATIONS * cost.needed:
        return (
            f'compute {cost.operations / cost.needed:.3g} times what their formula needs {case}, '
            f'allowed are {_ALLOWED_OPERATIONS:g}'
        )
    return ''
