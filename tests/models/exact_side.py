"""Prints how far the decoder's logits are from those of transformers, both in float64: run by test_parity.

    JAX_ENABLE_X64=1 python -m tests.models.exact_side [NAME...]

The decoder computes in jnp.float32, which is float64 in this process. One JSON object: the largest difference by name.
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
from tests.models import parity  # noqa: E402


def largest_difference(name: str, recorded: dict[str, np.ndarray]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        parity.write(pathlib.Path(folder), name)
        config, params = load_hf(folder)
    decoder, params = Decoder(config), jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    @jax.jit
    def run(params, tokens):
        positions, ones = jnp.arange(len(tokens), dtype=jnp.int32), jnp.ones(len(tokens), jnp.int32)

        def attend(q, k, v, entry, window, sinks=None):
            ids = RowIds(ones[None], ones[None], positions[None], 0)
            setting = Setting(q.shape[-1] ** -0.5, window)
            return attend_dense(q[None], k[None], v[None], ids, setting, sinks)[0], entry

        return decoder.logits(params, decoder.hidden(params, tokens, positions, attend)[0])

    errors = []
    for number, text in enumerate(parity.texts(name)):
        found = np.asarray(run(params, jnp.asarray(text)))
        assert found.dtype == np.float64
        errors.append(np.abs(found - recorded[f'{name}/{number}/exact']).max())
    return float(max(errors))


def main() -> None:
    with np.load(parity.RECORDED) as file:
        recorded = dict(file)
    print(json.dumps({name: largest_difference(name, recorded) for name in sys.argv[1:] or parity.EXACT}))


if __name__ == '__main__':
    main()
