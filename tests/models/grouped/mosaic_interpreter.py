"""Mosaic kernels of jax on a CPU: its interpreter, which knows neither transposed operands nor layouts of registers."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jax._src.pallas.mosaic_gpu.interpret.params import force_gpu_interpret_mode
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu


class _Transposed(NamedTuple):
    ref: Any


def _wgmma(total: Any, a: Any, b: Any) -> None:
    _read(a, lambda a: _read(b, lambda b: mosaic_gpu.wgmma(total, a, b)))


def _read(operand: Any, use: Callable[[Any], None]) -> None:
    """Calls `use` with the operand, or with a copy of it if it is transposed."""
    if not isinstance(operand, _Transposed):
        return use(operand)

    def transpose(copy: Any) -> None:
        copy[...] = operand.ref[...].T
        use(copy)

    return pl.run_scoped(transpose, mosaic_gpu.SMEM(operand.ref.shape[::-1], operand.ref.dtype))


@contextlib.contextmanager
def interpreted(monkeypatch: Any) -> Iterator[None]:
    """Programs that are traced inside run their Mosaic kernels by the interpreter."""
    replaced = {
        'wgmma': _wgmma,
        'transpose_ref': lambda ref, _: _Transposed(ref),
        'layout_cast': lambda value, _: value,
    }
    for kernels in (ragged_dot_mgpu, transposed_ragged_dot_mgpu):
        monkeypatch.setattr(kernels, 'plgpu', types.SimpleNamespace(**(vars(mosaic_gpu) | replaced)))
    with force_gpu_interpret_mode():
        yield
