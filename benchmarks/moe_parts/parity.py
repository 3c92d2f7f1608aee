"""Tiny checkpoints of every family against transformers: logits, chosen routes, gradients along given routes."""

from __future__ import annotations

import pathlib
import subprocess
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.errors import UserError
from areal_jax.formats.hf_directory import load_hf, to_hf_names
from areal_jax.models.attention.backends import packed_attention
from areal_jax.models.decoder import Decoder
from areal_jax.models.experts import Routing
from areal_jax.models.weights import Params
from areal_jax.types import Tree
from tests.models import parity

CHECKPOINTS = ('qwen3_moe', 'qwen3_moe_mixed', 'mixtral', 'olmoe')
MOST_LOGITS, MOST_GRADIENT, CLOSE_SCORES = 1e-5, 1e-4, 1e-6
_SIDE = pathlib.Path(__file__).with_name('transformers_side.py')
_FUSED = ('gate_up_proj', 'down_proj')  # transformers holds experts as two leaves


def measure_parity(options: Any) -> dict[str, Any]:
    """Of every checkpoint: largest difference of a logit, over their range; of a gradient, over its norm, along routes
    other than the chosen ones; and how many choices differ from those of transformers.
    """
    if not options.torch_python:
        raise UserError('--torch-python is not set: an interpreter with torch and transformers is needed')
    found = {name: _compare(name, options.torch_python) for name in CHECKPOINTS}
    met = all(
        one['logits'] <= MOST_LOGITS and one['gradient'] <= MOST_GRADIENT and one['routes'] == 0
        for one in found.values()
    )
    return {'value': found, 'met': met}


def _compare(name: str, python: str) -> dict[str, float]:
    text = parity.texts(name)[0]
    with tempfile.TemporaryDirectory() as folder:
        directory = pathlib.Path(folder)
        parity.write(directory / 'model', name)
        config, params = load_hf(directory / 'model')
        decoder = Decoder(config)
        logits, routed = _run(decoder, params, text)
        assert routed is not None
        assert config.experts is not None
        foreign = (np.asarray(routed.live) + 1) % config.experts.count
        cotangent = np.random.default_rng(0).normal(size=logits.shape).astype(np.float32)
        np.savez(directory / 'in.npz', tokens=text.astype(np.int64), cotangent=cotangent, routes=foreign.astype(int))
        words = [str(directory / part) for part in ('model', 'in.npz', 'out.npz')]
        subprocess.run([python, str(_SIDE), *words], check=True, capture_output=True)
        theirs = dict(np.load(directory / 'out.npz'))
    value = lambda p: jnp.sum(_run(decoder, p, text, jnp.asarray(foreign))[0] * cotangent)
    ours = {key: np.asarray(leaf) for key, leaf in to_hf_names(jax.grad(value)(params), config).items()}
    return {
        'logits': float(np.abs(logits - theirs['logits']).max() / np.ptp(theirs['logits'])),
        'gradient': max(_gradient_differences(ours, theirs)),
        'routes': _count_differences(np.asarray(routed.live), theirs),
    }


def _run(decoder: Decoder, params: Params, text: np.ndarray, recorded: jax.Array | None = None) -> tuple[Any, Any]:
    ones, positions = jnp.ones(len(text), jnp.int32), jnp.arange(len(text))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, entry: Tree, window: int | None) -> tuple[jax.Array, Tree]:
        scale = q.shape[-1] ** -0.5
        out = packed_attention(q, k, v, ones, ones, scale=scale, positions=positions, window=window, impl='dense')
        return out, entry

    states, _, routed = decoder.hidden_and_routes(
        params, jnp.asarray(text), positions, attend, routing=Routing(recorded=recorded)
    )
    return decoder.logits(params, states), routed


def _gradient_differences(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> list[float]:
    """Of each leaf of transformers."""
    found = []
    for key, expected in theirs.items():
        if not key.startswith('gradient/'):
            continue
        name = key.removeprefix('gradient/')
        actual = _fuse(ours, name, len(expected)) if name.endswith(_FUSED) else ours[_file_name(name, ours)]
        found.append(float(np.linalg.norm(actual - expected) / np.linalg.norm(expected)))
    return found


def _file_name(name: str, ours: dict[str, np.ndarray]) -> str:
    """Files of Mixtral call the module of the experts otherwise than the model in memory."""
    return name if name in ours else name.replace('.mlp.', '.block_sparse_moe.')


def _fuse(ours: dict[str, np.ndarray], name: str, experts: int) -> np.ndarray:
    """[E, 2 M, d] or [E, d, M] of one tensor an expert."""
    place, _, leaf = name.rpartition('.')
    parts = ('gate_proj', 'up_proj') if leaf == 'gate_up_proj' else ('down_proj',)
    if f'{place}.0.gate_proj.weight' not in ours:
        place = place.replace('.mlp.', '.block_sparse_moe.')
        parts = ('w1', 'w3') if leaf == 'gate_up_proj' else ('w2',)
    return np.stack([np.concatenate([ours[f'{place}.{e}.{part}.weight'] for part in parts]) for e in range(experts)])


def _count_differences(live: np.ndarray, theirs: dict[str, np.ndarray]) -> int:
    """Sets of experts that differ though the scores of the k-th and the next are not within CLOSE_SCORES."""
    count = 0
    for layer, chosen in enumerate(live):
        ranked = -np.sort(-theirs[f'scores/{layer}'], axis=-1)
        close = ranked[:, chosen.shape[1] - 1] - ranked[:, chosen.shape[1]] < CLOSE_SCORES
        differ = (np.sort(chosen, -1) != np.sort(theirs[f'routes/{layer}'], -1)).any(-1)
        count += int((differ & ~close).sum())
    return count
