"""Prints how far the decoder's logits are from those of transformers: run by test_parity.

    JAX_ENABLE_X64=1 python -m tests.models.exact_side [NAME...]
    python -m tests.models.exact_side [NAME...]
    JAX_ENABLE_X64=1 python -m tests.models.exact_side --packed NAME...

The first command has both in float64: the decoder computes in jnp.float32, which is float64 in that process. It prints
one JSON object by name: the largest difference of logits with the router's own choice of experts, which is replayed
where the model has a sigmoid router, and with `foreign` experts. The second has both in float32, for models of
parity.SIGMOID: that difference, alone and as a part of the logits' range, and how far each is from transformers in
float64. With --packed, by family with delta nets or latent attention: answers that share their prompt against answers
behind their own prompts, the largest difference of log-probs and that of a leaf of the gradient, of its norm.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

IS_EXACT = jax.config.jax_enable_x64
if IS_EXACT:
    jnp.float32 = jnp.float64

from areal_jax.formats.hf_directory import load_hf  # noqa: E402
from areal_jax.models.attention.flash import RowIds, Setting, attend_dense  # noqa: E402
from areal_jax.models.decoder import Decoder  # noqa: E402
from areal_jax.models.delta_rule import DeltaInputs, run_rows  # noqa: E402
from areal_jax.models.experts import Routing  # noqa: E402
from tests.models import parity  # noqa: E402

CHUNK = 8  # tokens: a text has several chunks, the last one in part
Logits = dict[str, list[np.ndarray]]  # 'live' and perhaps 'foreign' -> of each text


def row_of(inputs: DeltaInputs) -> DeltaInputs:
    return inputs.map_tokens(lambda x: x[None])


def compute(name: str) -> Logits:
    """The decoder's logits; 'live' by a replay of its own choice if it has a sigmoid router."""
    with tempfile.TemporaryDirectory() as folder:
        parity.write(pathlib.Path(folder), name)
        config, params = load_hf(folder)
    dtype = jnp.dtype(jnp.float32)
    decoder, params = Decoder(config), jax.tree.map(lambda leaf: np.asarray(leaf, dtype), params)

    @jax.jit
    def run(params, tokens, recorded=None):
        positions, ones = jnp.arange(len(tokens), dtype=jnp.int32), jnp.ones(len(tokens), jnp.int32)

        def attend(q, k, v, entry, window, sinks=None):
            ids = RowIds(ones[None], ones[None], positions[None], 0)
            setting = Setting(q.shape[-1] ** -0.5, window)
            return attend_dense(q[None], k[None], v[None], ids, setting, sinks)[0], entry

        recur = lambda inputs, entry: (run_rows(row_of(inputs), ones[None], ones[None], CHUNK)[0], entry)
        routing = Routing(recorded=recorded)
        hidden, _, routed = decoder.hidden_and_routes(params, tokens, positions, attend, recur=recur, routing=routing)
        return decoder.logits(params, hidden), routed

    found: Logits = {'live': []}
    for number, text in enumerate(parity.texts(name)):
        logits, routed = run(params, jnp.asarray(text))
        if name in parity.SIGMOID:
            logits, _ = run(params, jnp.asarray(text), routed.live)
            foreign = jnp.asarray(parity.foreign_routes(name)[number])
            found.setdefault('foreign', []).append(np.asarray(run(params, jnp.asarray(text), foreign)[0]))
        found['live'].append(np.asarray(logits))
        assert found['live'][-1].dtype == dtype
    return found


def of_transformers(name: str, routes: str, *, exact: bool) -> list[np.ndarray]:
    with np.load(parity.RECORDED) as file:
        key = {'live': 'exact', 'foreign': 'forced_exact'} if exact else {'live': 'logits', 'foreign': 'forced'}
        return [file[f'{name}/{number}/{key[routes]}'] for number in range(len(parity.LENGTHS))]


def largest(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    return max(float(np.abs(one - other).max()) for one, other in zip(ours, theirs, strict=True))


def exact_differences(name: str) -> dict[str, float]:
    return {
        routes: largest(logits, of_transformers(name, routes, exact=True)) for routes, logits in compute(name).items()
    }


def rounded_differences(name: str) -> dict[str, dict[str, float]]:
    """By routes, of float32: see the module."""
    found = {}
    for routes, ours in compute(name).items():
        theirs, exact = (of_transformers(name, routes, exact=exact) for exact in (False, True))
        of_range = [one / np.ptp(other) for one, other in zip(ours, theirs, strict=True)]
        found[routes] = {
            'difference': largest(ours, theirs),
            'of_range': largest(of_range, [other / np.ptp(other) for other in theirs]),
            'ours_from_exact': largest(ours, exact),
            'theirs_from_exact': largest(theirs, exact),
        }
    return found


def packed_differences(name: str) -> tuple[float, float]:
    """(of log-probs, of a leaf of the gradient) of a tiny model of family_examples."""
    from areal_jax.learning import forward
    from tests.learning import test_families as packed

    def attend(q, k, v, segments, parents, *, scale, impl, positions, window, first, sinks):
        ids = RowIds(segments, parents, positions, first)
        return attend_dense(q, k, v, ids, Setting(scale, window), sinks)

    forward.packed_rows_attention = attend  # whose backends refuse float64
    config = packed.CONFIGS[name]
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), packed.draw(config))
    weights = np.random.default_rng(1).normal(size=sum(packed.ANSWERS)).astype(np.float32)
    run = packed.compiled(config, 'dense')
    (_, found), gradient = run(params, packed.shared_row(), packed.with_padding(weights))
    (_, apart), expected = run(params, packed.rows_apart(), packed.by_answer(weights))
    assert found.dtype == np.float64
    error = lambda one, other: float(np.linalg.norm(one - other) / np.linalg.norm(other))
    of_leaves = jax.tree.leaves(jax.tree.map(error, gradient, expected))
    return float(np.abs(found[0] - packed.of_answers(apart)).max()), max(of_leaves)


def main() -> None:
    if sys.argv[1:2] == ['--packed']:
        print(json.dumps({name: packed_differences(name) for name in sys.argv[2:]}))
        return
    differences = exact_differences if IS_EXACT else rounded_differences
    names = (*parity.EXACT, *parity.HYBRIDS) if IS_EXACT else parity.SIGMOID
    print(json.dumps({name: differences(name) for name in sys.argv[1:] or names}))


if __name__ == '__main__':
    main()
