"""Prints how far the decoder's logits are from those of transformers, both in float64: run by test_parity.

    JAX_ENABLE_X64=1 python -m tests.models.exact_side [NAME...]
    JAX_ENABLE_X64=1 python -m tests.models.exact_side --packed

The decoder computes in jnp.float32, which is float64 in this process. One JSON object: the largest difference by name.
With --packed, by hybrid family: answers that share their prompt against answers behind their own prompts, the largest
difference of log-probs and that of a leaf of the gradient, of its norm.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

jnp.float32 = jnp.float64

from areal_jax.formats.hf_directory import load_hf  # noqa: E402
from areal_jax.models.attention.flash import RowIds, Setting, attend_dense  # noqa: E402
from areal_jax.models.decoder import Decoder  # noqa: E402
from areal_jax.models.delta_rule import DeltaInputs, run_rows  # noqa: E402
from areal_jax.models.experts import Routing  # noqa: E402
from tests.models import parity  # noqa: E402

NAMES = (*parity.EXACT, *parity.HYBRIDS)
CHUNK = 8  # tokens: a text has several chunks, the last one in part


def row_of(inputs: DeltaInputs) -> DeltaInputs:
    return inputs.map_tokens(lambda x: x[None])


def largest_difference(name: str, recorded: dict[str, np.ndarray]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        parity.write(pathlib.Path(folder), name)
        config, params = load_hf(folder)
    decoder, params = Decoder(config), jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    @jax.jit
    def run(params, tokens, recorded=None):
        positions, ones = jnp.arange(len(tokens), dtype=jnp.int32), jnp.ones(len(tokens), jnp.int32)

        def attend(q, k, v, entry, window, sinks=None):
            ids = RowIds(ones[None], ones[None], positions[None], 0)
            setting = Setting(q.shape[-1] ** -0.5, window)
            return attend_dense(q[None], k[None], v[None], ids, setting, sinks)[0], entry

        recur = lambda inputs, entry: (run_rows(row_of(inputs), ones[None], ones[None], CHUNK)[0], entry)
        routing = Routing(recorded=recorded)
        hidden, *_ = decoder.hidden(params, tokens, positions, attend, recur=recur, routing=routing)
        return decoder.logits(params, hidden)

    errors = []
    for number, text in enumerate(parity.texts(name)):
        found = np.asarray(run(params, jnp.asarray(text)))
        assert found.dtype == np.float64
        errors.append(np.abs(found - recorded[f'{name}/{number}/exact']).max())
        if name in parity.SIGMOID:
            forced = run(params, jnp.asarray(text), jnp.asarray(parity.foreign_routes(name)[number]))
            errors.append(np.abs(forced - recorded[f'{name}/{number}/forced']).max())
    return float(max(errors))


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
    if sys.argv[1:] == ['--packed']:
        from tests.models.family_examples import HYBRIDS

        print(json.dumps({name: packed_differences(name) for name in HYBRIDS}))
        return
    with np.load(parity.RECORDED) as file:
        recorded = dict(file)
    print(json.dumps({name: largest_difference(name, recorded) for name in sys.argv[1:] or NAMES}))


if __name__ == '__main__':
    main()
