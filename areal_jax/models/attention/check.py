"""The check of an attention backend at start-up, on the device and in the dtype of the run.

It is needed because fused kernels have silently ignored segment ids and have read wrong tokens with grouped keys, see
`cudnn`. The learner uses it when it chooses a backend.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.models.attention.backends import (
    BACKENDS,
    AttentionError,
    Backend,
    choose_implementation,
    describe_device,
    is_attached,
    jax_settings,
    packed_attention,
)

_TOKENS = 160
_HEADS, _KEY_HEADS = 4, 2
_WINDOW = 24  # tokens: replaces the model's window, which would be longer than the segments of the check
_FIRST, _QUERIES = 37, 80  # of the slice that is checked
# largest error relative to the largest value; a wrong mask or head gives 0.1 and more
_ALLOWED = {'float32': 2e-2, 'bfloat16': 4e-2, 'float16': 2e-2}  # accelerators multiply float32 with fewer bits
_ALLOWED_FLOAT32_ON_CPU = 1e-4


def self_check(
    impl: str,
    *,
    dtype: jax.typing.DTypeLike,
    head_dim: int = 64,
    window: int | None = None,
    slices: bool = False,
    sinks: bool = False,
    interpret: bool = False,
) -> float:
    """Compares a small packed row with a dense float64 softmax, forward and gradient, and raises if they differ.

    The row has grouped keys, three segments that end inside of blocks and a padded tail. If the backend can share
    prompts, a second row has two answers that share their prompt.

    Args:
      dtype, head_dim, window, slices, sinks: of the run, as for choose_implementation; the size of a window is not
        used.
      interpret: as for packed_attention.

    Returns the largest error of an output or gradient, relative to its largest value.

    Raises AttentionError, naming the backend, the array that differs, the error and a backend to use instead.
    """
    rng = np.random.default_rng(0)
    shapes = [(_TOKENS, heads, head_dim) for heads in (_HEADS, _KEY_HEADS, _KEY_HEADS, _HEADS)]
    q, k, v, d_out = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    first, count = (_FIRST, _QUERIES) if slices else (0, _TOKENS)
    window, scale = None if window is None else _WINDOW, head_dim**-0.5
    part = slice(first, first + count)
    logits = jnp.asarray(rng.normal(size=_HEADS), dtype) if sinks else None

    # on a CPU almost all of the time is compilation, a third of it optimisation, which does not pay for two runs
    options = {'xla_backend_optimization_level': 0} if jax.default_backend() == 'cpu' else None

    @functools.partial(jax.jit, compiler_options=options)
    def run(first: jax.Array, segments: jax.Array, parents: jax.Array, positions: jax.Array) -> tuple[jax.Array, ...]:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array, *sinks: jax.Array) -> jax.Array:
            return packed_attention(
                q, k, v, segments, parents, scale=scale, impl=impl, positions=positions, window=window,
                first=first if slices else 0, sinks=sinks[0] if sinks else None, interpret=interpret,
            )  # fmt: skip

        out, pull = jax.vjp(attend, q[part], k, v, *(() if logits is None else (logits,)))
        return out, *pull(d_out[part])

    errors = []
    for row, segments, parents, positions in _rows(BACKENDS[impl].shares_prompts):
        seen = _seen(segments, parents, positions, window)
        arrays = [np.asarray(x, np.float64) for x in (q, k, v, d_out)]
        expected = _dense(arrays, seen, scale, part, None if logits is None else np.asarray(logits, np.float64))
        try:
            found = jax.device_get(run(jnp.int32(first), segments, parents, positions))  # a GPU fails here, not before
        except AttentionError:
            raise
        except Exception as error:  # kernels and private modules of jax fail in many ways, a missing name among them
            reason = str(error) or type(error).__name__
            raise AttentionError(f'attention {impl!r} does not run here: {reason}; {_way_out(impl)}') from error
        for name, value, reference in zip(('output', *_GRADIENTS)[: len(found)], found, expected, strict=True):
            what, measured = f'{name} of {row}', np.asarray(value, np.float64)
            errors.append(_compare(impl, what, measured, reference, jnp.dtype(dtype).name))
    return max(errors)


def choose_checked(
    impl: str,
    *,
    tokens: int,
    dtype: jax.typing.DTypeLike,
    head_dim: int,
    window: int | None = None,
    slices: bool = False,
    sinks: bool = False,
    device: jax.Device | None = None,
) -> tuple[str, tuple[str, ...]]:
    """(the backend to use on the device, why 'auto' rejected faster ones); see choose_implementation.

    A process checks a backend once for each dtype, head size and kind of mask: further learners take the result. On a
    device of a topology that is only described nothing can be checked, and some backends cannot be compiled.

    Args:
      device: None = the first of this process.

    Raises AttentionError if a backend that was asked for by name fails its self-check.
    """
    device = jax.local_devices()[0] if device is None else device
    platform, capability = describe_device(device)
    excluded: dict[str, str] = {}
    while True:
        name = choose_implementation(
            impl, platform=platform, capability=capability, tokens=tokens, dtype=dtype, head_dim=head_dim,
            window=window, slices=slices, sinks=sinks, excluded=excluded,
        )  # fmt: skip
        try:
            if is_attached(device):
                _check_once(
                    name, BACKENDS[name], (platform, capability), jax_settings(),
                    jnp.dtype(dtype).name, head_dim, window is not None, slices, sinks,
                )  # fmt: skip
            elif BACKENDS[name].asks_device:
                raise AttentionError(f'attention {name!r} cannot be compiled for a device that is only described')
            return name, tuple(excluded.values())
        except AttentionError as error:
            if impl != 'auto':
                raise
            excluded[name] = str(error)


@functools.lru_cache(maxsize=64)  # a check that fails raises, and is not kept
def _check_once(
    impl: str,
    backend: Backend,
    device: tuple[str, tuple[int, int] | None],
    settings: str,
    dtype: str,
    head_dim: int,
    has_window: bool,
    slices: bool,
    sinks: bool,
) -> None:
    window = _WINDOW if has_window else None
    self_check(impl, dtype=dtype, head_dim=head_dim, window=window, slices=slices, sinks=sinks)


_GRADIENTS = ('gradient of q', 'gradient of k', 'gradient of v', 'gradient of the sinks')


def _rows(shares_prompts: bool) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
    """Yields (description, segment ids, parent ids, positions) of each row, int32 [T]."""
    yield 'a packed row', *_row((70, 1, 70), (31, 2, 31), (40, 3, 40))
    if shares_prompts:  # prompt 1 of 50 tokens with answers 2 and 3, then a separate segment
        yield 'a row with a shared prompt', *_row((50, 1, 50), (20, 1, 70), (31, 1, 81), (40, 4, 40))


def _row(*segments: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The ids and positions of a row, from (length, parent, position after the last token) per segment."""
    ids = np.zeros((3, _TOKENS), np.int32)
    start = 0
    for index, (length, parent, end) in enumerate(segments):
        ids[:, start : start + length] = np.stack(
            [np.full(length, index + 1), np.full(length, parent), np.arange(end - length, end)]
        )
        start += length
    ids[2, start:] = np.arange(_TOKENS - start)
    return ids[0], ids[1], ids[2]


def _seen(segments: np.ndarray, parents: np.ndarray, positions: np.ndarray, window: int | None) -> np.ndarray:
    seen = np.tril((segments[:, None] == segments) | (parents[:, None] == segments))
    return seen if window is None else seen & (positions[:, None] - positions < window)


def _dense(
    arrays: list[np.ndarray], seen: np.ndarray, scale: float, part: slice, sinks: np.ndarray | None
) -> tuple[np.ndarray, ...]:
    """Output and gradients by definition, for the queries of `part`; arrays are q, k, v and d_out."""
    q, k, v, d_out = arrays
    q, d_out, seen = q[part], d_out[part], seen[part]
    groups = k.shape[1]
    k, v = (np.repeat(x, q.shape[1] // groups, axis=1) for x in (k, v))
    scores = np.where(seen, np.einsum('tnd,snd->nts', q, k) * scale, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - scores.max(axis=-1, keepdims=True))
    weights /= total
    d_weights = np.einsum('tnd,snd->nts', d_out, v)
    overlap = (weights * d_weights).sum(axis=-1, keepdims=True)
    d_scores = weights * (d_weights - overlap) * scale
    d_k, d_v = np.einsum('nts,tnd->snd', d_scores, q), np.einsum('nts,tnd->snd', weights, d_out)
    d_k, d_v = (x.reshape(len(x), groups, -1, x.shape[-1]).sum(axis=2) for x in (d_k, d_v))
    found = np.einsum('nts,snd->tnd', weights, v), np.einsum('nts,snd->tnd', d_scores, k), d_k, d_v
    if sinks is None:
        return found
    return *found, -((1 - weights.sum(axis=-1, keepdims=True)) * overlap).sum(axis=(1, 2))


def _compare(impl: str, what: str, found: np.ndarray, expected: np.ndarray, dtype: str) -> float:
    allowed = _ALLOWED[dtype]
    if dtype == 'float32' and jax.default_backend() == 'cpu':
        allowed = _ALLOWED_FLOAT32_ON_CPU
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not error <= allowed:  # NaN fails too
        raise AttentionError(
            f'attention {impl!r} fails its self-check: {what} is off by {error:.2g} of its largest value in {dtype} on '
            f'{jax.default_backend()!r}, allowed are {allowed:g}; {_way_out(impl)}'
        )
    return error


def _way_out(impl: str) -> str:
    return f'use {"dense" if impl == "blocked" else "blocked"!r}, which runs everywhere'
