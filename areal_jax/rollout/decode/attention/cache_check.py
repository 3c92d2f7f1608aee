"""The check of a decode attention at start-up, on the device, in the dtype and with the heads and blocks of the run.

It runs when the backend chooses one. Kernels were written without a device at hand, and one that reads a wrong page or
a masked position would decode on, only worse.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.models.attention import AttentionError
from areal_jax.rollout.decode.attention.choose import IMPLEMENTATIONS, SETTING, Demand, choose_implementation
from areal_jax.rollout.decode.attention.loops import CacheAttention

TABLE_BLOCKS = 4  # of the tables of the check, which an implementation for one length of table must have
ROWS = 8  # sequences of the check
_FREE_BLOCKS = 2  # not used by any row: they hold NaN, like all that belongs to no sequence
# largest error relative to the largest value; a wrong page, head or mask gives 0.1 and more
_ALLOWED = {'float32': 2e-2, 'bfloat16': 4e-2, 'float16': 2e-2}  # accelerators multiply float32 with fewer bits
_ALLOWED_FLOAT32_ON_CPU = 1e-4


def choose_checked(impl: str, demand: Demand, device: jax.Device) -> tuple[CacheAttention, tuple[str, ...]]:
    """(the attention to use on this device, why 'auto' rejected faster ones); see choose.choose_implementation.

    Programs in plain JAX, which run everywhere, are not checked. Raises AttentionError where a kernel that was asked
    for by name fails its check.
    """
    rejected: dict[str, str] = {}
    while True:
        name = choose_implementation(impl, demand, device, rejected)
        try:
            attention = IMPLEMENTATIONS[name].make(demand)
            if IMPLEMENTATIONS[name].is_kernel:
                self_check(attention, demand, device)
            return attention, tuple(rejected.values())
        except AttentionError as error:
            if impl != 'auto':
                raise
            rejected[name] = str(error)


def self_check(attention: CacheAttention, demand: Demand, device: jax.Device) -> float:
    """Compares rows of several lengths with a dense float64 softmax, and raises where they differ.

    The rows share their first block two by two; their blocks lie in random order; all that belongs to no row holds NaN;
    one block is a copy. Both `attend`, without and, if the demand has one, with a window, and `read` are compared.

    Returns the largest error, relative to the largest value.

    Raises AttentionError, naming the implementation, what differs, by how much and what to use instead.
    """
    case = _make_case(demand)
    try:
        with jax.default_device(device):
            found = jax.device_get(_run(attention, case, demand))
    except AttentionError:
        raise
    except Exception as error:  # kernels and experimental modules of jax fail in many ways, a missing name among them
        reason = str(error) or type(error).__name__
        raise AttentionError(f'{SETTING}={attention.name!r} does not run here: {reason}; {_WAY_OUT}') from error
    blocks, outs = found
    errors = [_compare(attention.name, 'a read block', blocks, case.read(), demand.dtype, device)]
    for window, out in zip(case.windows, outs, strict=True):
        what = 'attention' if window is None else f'attention in a window of {window}'
        rows = np.asarray(out, np.float64)
        if not np.isfinite(rows).all():
            raise AttentionError(
                f'{SETTING}={attention.name!r} fails its check: {what} is not finite in {len(rows)} rows of lengths '
                f'{case.lengths.tolist()}, because what lies beyond them is not masked; {_WAY_OUT}'
            )
        live = case.lengths > 0
        errors.append(_compare(attention.name, what, rows[live], case.attend(window)[live], demand.dtype, device))
    return max(errors)


_WAY_OUT = "use 'gather', which runs everywhere"


@dataclasses.dataclass(frozen=True)
class _Case:
    """Rows over blocks. N tokens are written: every position of every block once."""

    q: np.ndarray  # [B, H, D]
    k: np.ndarray  # [blocks, T, K, D], NaN where no row reads
    v: np.ndarray  # likewise
    tables: np.ndarray  # int32 [B, M]
    lengths: np.ndarray  # int32 [B], descending, the last 0
    copied: tuple[int, int]  # (source, target): the target gets its content from `copy`
    windows: tuple[int | None, ...]

    def read(self) -> np.ndarray:
        """[2, 2 T, K, D]: keys and values of the source and the target."""
        source = list(self.copied[:1]) * 2
        return np.stack([x[source].reshape(-1, *x.shape[2:]) for x in (self.k, self.v)]).astype(np.float64)

    def attend(self, window: int | None) -> np.ndarray:
        """By definition, float64 [B, H, D]; 0 for a row without positions."""
        out = np.zeros(self.q.shape)
        for row, length in enumerate(self.lengths):
            first = 0 if window is None else max(0, length - window)
            k, v = (
                x[self.tables[row]].reshape(-1, *x.shape[2:])[first:length].astype(np.float64) for x in (self.k, self.v)
            )
            q = self.q[row].astype(np.float64).reshape(k.shape[1], -1, k.shape[2])
            if length:
                scores = np.einsum('kgd,skd->kgs', q, k) * k.shape[2] ** -0.5
                weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
                weights /= weights.sum(axis=-1, keepdims=True)
                out[row] = np.einsum('kgs,skd->kgd', weights, v).reshape(out[row].shape)
        return out


def _make_case(demand: Demand) -> _Case:
    rng, tokens = np.random.default_rng(0), demand.block_tokens
    blocks = ROWS * TABLE_BLOCKS + _FREE_BLOCKS
    tables = rng.permutation(blocks)[: ROWS * TABLE_BLOCKS].reshape(ROWS, TABLE_BLOCKS).astype(np.int32)
    tables[1::2, 0] = tables[::2, 0]  # a shared prompt
    whole = TABLE_BLOCKS * tokens
    lengths = [whole, whole - 1, 3 * tokens + 1, 2 * tokens, tokens + tokens // 2 + 1, tokens, 1, 0]
    lengths.sort(reverse=True)  # blocks of one token
    q, k, v = (
        rng.normal(size=shape).astype(jnp.dtype(demand.dtype))
        for shape in (
            (ROWS, demand.heads, demand.head_dim),
            *((blocks, tokens, demand.kv_heads, demand.head_dim),) * 2,
        )
    )
    read = np.zeros((blocks, tokens), bool)
    for row, length in zip(tables, lengths, strict=True):
        places = np.arange(length)
        read[row[places // tokens], places % tokens] = True
    for x in (k, v):
        x[~read] = np.nan
    copied = int(tables[0, 1]), int(tables[1, 1])
    for x in (k, v):
        x[copied[1]] = x[copied[0]]
    windows = (None, tokens + tokens // 2) if demand.windows else (None,)
    return _Case(q, k, v, tables, np.array(lengths, np.int32), copied, windows)


def _run(attention: CacheAttention, case: _Case, demand: Demand) -> tuple[jax.Array, list[jax.Array]]:
    """(keys and values of the copied block and its source [2, 2 T, K, D], out [B, H, D] for each window)."""
    blocks, tokens = case.k.shape[:2]
    block, offset = (index.astype(np.int32).ravel() for index in np.indices((blocks, tokens)))

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        layer = attention.empty(blocks, demand.kv_heads, tokens, demand.head_dim, jnp.dtype(demand.dtype))
        layer = attention.write(layer, k, v, jnp.asarray(block), jnp.asarray(offset))
        layer = attention.copy(layer, *(jnp.full(1, block, jnp.int32) for block in case.copied))
        tables, lengths = jnp.asarray(case.tables), jnp.asarray(case.lengths)
        outs = [attention.attend(q, layer, tables, lengths, window) for window in case.windows]
        return jnp.stack(attention.read(layer, jnp.array(case.copied, jnp.int32))), outs

    k, v = (x.copy() for x in (case.k, case.v))
    k[case.copied[1]], v[case.copied[1]] = 0, 0
    return run(case.q, *(x.reshape(-1, *x.shape[2:]) for x in (k, v)))


def _compare(
    name: str, what: str, found: np.ndarray, expected: np.ndarray, dtype: jax.typing.DTypeLike, device: jax.Device
) -> float:
    """The largest error, relative to the largest expected value."""
    kind = jnp.dtype(dtype).name
    allowed = _ALLOWED_FLOAT32_ON_CPU if (kind, device.platform) == ('float32', 'cpu') else _ALLOWED[kind]
    error = float(np.abs(np.asarray(found, np.float64) - expected).max() / np.abs(expected).max())
    if not error <= allowed:  # NaN fails too
        raise AttentionError(
            f'{SETTING}={name!r} fails its check: {what} is off by {error:.2g} of its largest value in {kind} on '
            f'{device.platform!r}, allowed are {allowed:g}; {_WAY_OUT}'
        )
    return error
