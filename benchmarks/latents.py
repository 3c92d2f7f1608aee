"""The two forms of latent attention: what they cost in nats, and in CPU seconds of decoding.

    python -m benchmarks.latents --out=benchmarks/results/latents.json

- forms: log-probs of 96 tokens, absorbed against expanded and each against float64 of the same weights, in float32 and
  in bfloat16, with routes to experts that are free and that are those of float64. Bar: 1e-5 in float32.
- decoding: CPU seconds of 64 steps of 8 rows behind 1,000 tokens in a float32 engine, absorbed over expanded; and with
  attention that gathers whole tables over attention that reads what rows hold. The sides take turns in this process.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.models.layer_parts import Experts, LatentAttention, SigmoidRouter
from areal_jax.models.weights import leaf_dtype
from areal_jax.rollout.backend import DecodeRow, PrefillPiece
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend
from areal_jax.sharding.rules import path_name
from areal_jax.types import GenerationRequest, SamplingParams
from benchmarks.delta_nets import compare, timed_gradient
from benchmarks.options import Row, make_parser, report, run, show
from benchmarks.ratios import Bar, Run
from benchmarks.side_latents import log_probs

NATS, COST = 1e-5, Bar(1.0, at_least=False)
TOKENS = 96
ROWS, PROMPT, STEPS = 8, 1000, 64


def make_config(*, small: bool, heads: int = 8) -> ModelConfig:
    width, unit = (64, 8) if small else (256, 16)
    latent = LatentAttention(4 * unit, 2 * unit, unit, 2 * unit, 6 * unit)
    return ModelConfig(
        vocab_size=1000, d_model=width, n_layers=4, n_heads=heads, n_kv_heads=heads, head_dim=latent.head_dim,
        d_ff=2 * width, rope_theta=1e4, rotary_dim=unit, latent=latent, score_scale=latent.scale, family='deepseek_v3',
        tie_embeddings=False,
        experts=Experts(16, 4, width // 2, dense_layers=(0,), d_shared=width // 2, sigmoid=SigmoidRouter(4, 2, 2.5)),
    )  # fmt: skip


def measure_forms(options: argparse.Namespace) -> Row:
    config = make_config(small=options.small)
    tokens = np.random.default_rng(options.seed).integers(0, config.vocab_size, TOKENS).astype(np.int32)
    row: Row = {'row': 'forms', 'bar': NATS}
    for dtype in ('float32', 'bfloat16'):
        cast = lambda path, leaf, dtype=dtype: leaf.astype(leaf_dtype(path_name(path), dtype))
        params = jax.tree_util.tree_map_with_path(cast, Decoder(config).init(options.seed))
        exact, routes = run_exact(config, params, tokens)
        for kind, given in (('free', None), ('replayed', routes)):
            sides = {name: log_probs(one, params, tokens, given) for name, one in forms(config).items()}
            found = {name: side[0] for name, side in sides.items()}
            pairs = {'absorbed - expanded': found['absorbed'] - found['expanded']}
            pairs |= {f'{name} - float64': one - exact for name, one in found.items()}
            row[f'{dtype}, routes {kind}'] = {name: spread_next(of, tokens) for name, of in pairs.items()}
            one, other = (np.sort(side[1], axis=-1) for side in sides.values())
            row[f'{dtype}, routes {kind}, sets that differ'] = float(np.any(one != other, axis=-1).mean())
    worst = row['float32, routes free']['absorbed - expanded']['max']
    return row | {'met': bool(worst <= NATS)}


def forms(config: ModelConfig) -> dict[str, ModelConfig]:
    return {'absorbed': config.absorb(), 'expanded': config}


def spread_next(difference: np.ndarray, tokens: np.ndarray) -> dict[str, float]:
    """Of the log-probs of the tokens that follow, and of all tokens."""
    size = np.abs(difference.astype(np.float64))
    of_next = size[np.arange(len(tokens) - 1), tokens[1:]]
    return {'mean': float(of_next.mean()), 'max': float(of_next.max()), 'max of all': float(size.max())}


def run_exact(config: ModelConfig, params: Any, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs and routes in float64, from another process: there all that is float32 is float64."""
    with tempfile.TemporaryDirectory() as folder:
        case, out = (pathlib.Path(folder) / name for name in ('case', 'out'))
        arrays = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), params)  # holds the bits of bfloat16 too
        case.write_bytes(pickle.dumps((config, arrays, tokens)))
        command = [sys.executable, '-m', 'benchmarks.side_latents', str(case), str(out)]
        subprocess.run(command, check=True, env={**os.environ, 'JAX_ENABLE_X64': '1'})
        found: tuple[np.ndarray, np.ndarray] = pickle.loads(out.read_bytes())
        return found


def measure_decoding(options: argparse.Namespace) -> list[Row]:
    config = make_config(small=options.small, heads=8 if options.small else 16)
    calls = {
        f'{mla} {attention}': make_engine(config, mla, attention, small=options.small)
        for mla, attention in (('absorbed', 'auto'), ('expanded', 'auto'), ('absorbed', 'gather'))
    }
    found = []
    for name, over in (('absorbed auto', 'expanded auto'), ('absorbed auto', 'absorbed gather')):
        row = compare(f'decoding, {name} over {over}', {one: calls[one] for one in (name, over)}, COST, options.turns)
        tokens = ROWS * (4 if options.small else STEPS)
        row['tokens a CPU second'] = {
            side: float(np.median([tokens / call['cpu_s'] for call in of])) for side, of in row['calls'].items()
        }
        found.append(row)
    return found


def make_engine(config: ModelConfig, mla: str, attention: str, *, small: bool) -> Callable[[], Run]:
    """A call that decodes the same steps of the same rows again."""
    prompt, steps = (40, 4) if small else (PROMPT, STEPS)
    context = -(-(prompt + steps + 1) // 16) * 16
    engine = JaxDecodeBackend(
        Decoder(config), slots=ROWS, context_tokens=2 * context, block_tokens=16, prefill_buckets=(context,),
        decode_steps=steps, batch_buckets=(ROWS,), filtered=False, dtype='float32', mla=mla, attention=attention,
    )  # fmt: skip
    params, state = engine.prepare(Decoder(config).init(0)), engine.initial_state()
    rng, rows = np.random.default_rng(0), []
    for number in range(ROWS):
        tokens = rng.integers(0, config.vocab_size, prompt).astype(np.int32)
        request = GenerationRequest(number, 0, 0, tokens, SamplingParams(steps, 1.0, 0, 1.0, ()))
        blocks = [*range(number * context // 16, (number + 1) * context // 16)]
        state = engine.prefill(params, state, [PrefillPiece(tokens[:-1], 0, blocks)])
        rows.append(DecodeRow(request, int(tokens[-1]), prompt - 1, prompt + steps, blocks, tokens.tolist()))
    held = [state]

    def decode() -> Any:
        held[0], output = engine.generate(params, held[0], rows, steps)
        return output.tokens

    return lambda: timed_gradient(decode, ROWS * steps)


def measure(options: argparse.Namespace) -> list[Row]:
    rows = [measure_forms(options), *measure_decoding(options)]
    for row in rows:
        show(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where every bar is met, 2 where one is missed."""
    options = make_parser(__doc__, turns=5).parse_args(arguments)
    if options.small:
        options.turns = 1
    rows = report('latents', arguments, options, lambda: measure(options))['rows']
    return 0 if all(row['met'] for row in rows) else 2


if __name__ == '__main__':
    run('latents', lambda: sys.exit(main()))
