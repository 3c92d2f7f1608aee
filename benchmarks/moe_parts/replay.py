"""What following recorded experts is worth: log-probs of an engine and of a learner's pass under the same weights.

Rows 2, 3 and 4 of the table. Answers come from an engine with interruptions and preemptions, in groups; the learner
reads them in packed rows that share prompts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from areal_jax.errors import UserError
from areal_jax.models.decoder import Decoder
from areal_jax.models.experts import Routed, Routing
from benchmarks.moe_parts.replay_case import Generated, compare, count_bytes, generate, make_config

MOST_EXACT, LEAST_FOREIGN = 1e-5, 0.1  # nats: largest with replay; mean without, of foreign experts
LEAST_P99, LEAST_K3 = 4.0, 8.0  # without replay over with


def measure_exact(options: Any) -> dict[str, Any]:
    """Row 2: float32 on both sides."""
    config = make_config()
    params = Decoder(config).init(options.seed)
    made = _generate(config, params, 'float32', options.seed)
    found = {name: compare(config, params, made.groups, name == 'replay').describe() for name in ('replay', 'live')}
    return _with_facts(made, {
        'value': found, 'met': found['replay']['max'] <= MOST_EXACT, 'bytes_a_token': count_bytes(made.groups),
    })  # fmt: skip


def measure_rounded(options: Any) -> dict[str, Any]:
    """Row 3: an engine in bfloat16."""
    config = make_config()
    params = Decoder(config).init(options.seed)
    made = _generate(config, params, 'bfloat16', options.seed)
    found = {name: compare(config, params, made.groups, name == 'replay').describe() for name in ('replay', 'live')}
    gains = {name: found['live'][name] / found['replay'][name] for name in ('p99', 'k3', 'mean', 'max')}
    met = found['live']['sets'] > 0 and gains['p99'] >= LEAST_P99 and gains['k3'] >= LEAST_K3
    return _with_facts(made, {'value': found | {'without_over_with': gains}, 'met': met})


def measure_foreign(options: Any) -> dict[str, Any]:
    """Row 4: float32, and an engine whose routers are overruled by noise."""
    config = make_config()
    params = Decoder(config).init(options.seed)
    with _foreign_choice(options.seed):
        made = _generate(config, params, 'float32', options.seed)
    found = {name: compare(config, params, made.groups, name == 'replay').describe() for name in ('replay', 'live')}
    met = found['replay']['max'] <= MOST_EXACT and found['live']['mean'] > LEAST_FOREIGN
    return _with_facts(made, {'value': found, 'met': met})


def _generate(config: Any, params: Any, dtype: str, seed: int) -> Generated:
    made = generate(config, params, dtype, seed)
    if not (made.interrupted and made.preempted):
        raise UserError(f'{made.interrupted} answers were interrupted and {made.preempted} preempted: neither may be 0')
    return made


def _with_facts(made: Generated, row: dict[str, Any]) -> dict[str, Any]:
    tokens = sum(len(one.answer_tokens) for group in made.groups for one in group.trajectories)
    return row | {'tokens': tokens, 'interrupted': made.interrupted, 'preempted': made.preempted}


@contextlib.contextmanager
def _foreign_choice(seed: int) -> Iterator[None]:
    """Engines that are compiled meanwhile reach experts that are a function of token, position and layer."""
    own = Decoder.hidden_and_routes

    def foreign(
        self: Decoder, params: Any, tokens: jax.Array, positions: jax.Array, *args: Any, **named: Any
    ) -> tuple[jax.Array, Any, Routed | None]:
        experts, layers = self.config.experts, self.config.n_expert_layers
        assert experts is not None
        key = lambda token, position: jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), token), position)
        draw = lambda token, position: jax.random.uniform(key(token, position), (layers, experts.count))
        ids = jax.lax.top_k(jax.vmap(draw)(tokens, positions), experts.per_token)[1].astype(jnp.int32)
        ids = jnp.moveaxis(ids, 1, 0)
        routing = named.pop('routing', None) or Routing()
        states, cache, routed = own(
            self, params, tokens, positions, *args, routing=Routing(routing.mix, routing.valid, ids), **named
        )
        assert routed is not None
        return states, cache, routed._replace(live=ids)

    with (
        mock.patch.object(Decoder, 'hidden_and_routes', foreign),
        mock.patch.object(Decoder, 'can_step', return_value=False),  # the kernel of a step makes its own choice
    ):
        yield
