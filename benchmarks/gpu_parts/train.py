"""The train step of one shape on 16,384 packed tokens: tokens a second, model FLOPs utilisation, where the time goes.

    python -m benchmarks.gpu_parts.train SHAPE [update] [--tiny] OUT

`update` is what a run does: packing on the host, transfer, passes, optimizer, metrics. Its pieces are then timed by
themselves, unless the update alone is asked for, as for sets of XLA's flags.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.app.parts.learner_builder import build_optimizer
from areal_jax.config import TrackedConfig, default_config
from areal_jax.learning.learner import SpmdLearner
from areal_jax.learning.optimizer import Optimizer
from areal_jax.learning.passes import training_rows, training_scalars
from areal_jax.learning.row_layout import RowLayout
from areal_jax.models.attention.backends import packed_rows_attention
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.models.logprobs import token_logprobs
from areal_jax.sharding.placement import place
from areal_jax.sharding.rules import make_mesh, replicated
from areal_jax.types import TrajectoryGroup
from benchmarks.case import learner_settings, make_groups
from benchmarks.gpu_parts.cells import Cells, device_memory, measure_time, run_part
from benchmarks.gpu_parts.kernels import trace_kernels
from benchmarks.gpu_parts.shapes import (
    TrainCase,
    attention_flops,
    choose_remat,
    find_peak,
    state_bytes,
    train_case,
    train_flops,
)
from benchmarks.side_ours import program_bytes
from benchmarks.workload import Work

SEED = 0
_REPEATS = 8
_LESS = {'dots': 'attention', 'attention': 'full'}  # what keeps less for the backward pass
_OUT_OF_MEMORY = ('RESOURCE_EXHAUSTED', 'Out of memory', 'out of memory')


def measure(cells: Cells, shape: str, *only: str, tiny: bool) -> None:
    case = train_case(shape, tiny)
    memory = device_memory()
    remat: str | None = choose_remat(case, memory and memory.get('limit_bytes'))
    tried = []
    while remat:
        tried.append(remat)
        try:
            _measure(cells, case, remat, whole=not only)
            break
        except Exception as error:
            if not any(text in str(error) for text in _OUT_OF_MEMORY) or remat not in _LESS:
                raise
            cells.add(f'out of memory with remat={remat}', str(error)[:2000])
            remat = _LESS[remat]
        gc.collect()  # the learner that did not fit
    cells.add('remat_tried', tried)


def _measure(cells: Cells, case: TrainCase, remat: str, *, whole: bool) -> None:
    train = Training(case, remat)
    cells.add('case', train.describe())
    began = time.perf_counter()
    programs = train.learner.warm_up()
    cells.add('compile', {'seconds': time.perf_counter() - began, 'programs': programs})
    cells.add('program_bytes', program_bytes(train.learner))
    update = measure_time(train.update, _REPEATS)
    cells.add('update', update)
    if not whole:
        return
    pieces = train.time_pieces()
    cells.add('pieces', pieces)
    cells.add('rates', train.rates(update['median_s'], pieces))
    cells.add('device_memory', device_memory())
    attention = cells.attempt('attention', train.time_attention)
    head = cells.attempt('head', train.time_head)
    forward = cells.attempt('forward', train.time_forward)
    cells.add('shares', train.shares(pieces, attention, head, forward))
    cells.attempt('kernels', lambda: trace_kernels(train.update))


class Training:
    """A learner with random weights and the groups of one update; the learning rate is 0, so every call is the same."""

    def __init__(self, case: TrainCase, remat: str):
        self.case, self.remat = case, remat
        self._decoder = Decoder(case.model, layers='stacked', remat=remat)
        self.settings = learner_settings(
            row_tokens=case.row_tokens,
            row_loss_tokens=case.row_loss_tokens,
            rows_per_microbatch=1,
            packing='ordinary',
            dtype='bfloat16',
            publish_dtype='bfloat16',
        )
        self._mesh = make_mesh(devices=jax.local_devices()[:1])
        self.learner = SpmdLearner(
            self._decoder,
            Decoder(case.model).init(SEED),
            self._mesh,
            optimizer=_optimizer(case.optimizer),
            learning_rate=0.0,
            settings=self.settings,
        )
        self._groups = _groups(case)
        self._layout = RowLayout(case.model, self._mesh, self.settings)
        [self._batch] = self._pack()
        self.lengths = _segment_lengths(self._batch.segment_ids)
        self.loss_tokens = int(self._batch.loss_mask.sum())

    def describe(self) -> dict[str, Any]:
        model, parameters = self.case.model, self._decoder.parameter_count()
        return {
            'parameters': parameters,
            'optimizer': self.case.optimizer,
            'remat': self.remat,
            'dtype': self.settings.learner.dtype,
            'layers': 'stacked',
            'attention': self.learner.attention,
            'passed_over': list(self.learner.passed_over),
            'row_tokens': self.case.row_tokens,
            'microbatches': len(self._batch.tokens),
            'tokens': sum(self.lengths),
            'loss_tokens': self.loss_tokens,
            'segments': self.lengths,
            'flops': train_flops(model, self.lengths, self.loss_tokens),
            'attention_flops': attention_flops(model, self.lengths),
            'state_bytes': state_bytes(model, self.case.optimizer),
        }

    def update(self) -> None:
        """As the controller has it done; the metrics are on the host when it returns, so it has ended."""
        metrics = self.learner.update(self._groups, 0)
        if not metrics.get('update/optimizer_steps'):
            raise RuntimeError(f'the optimizer step was skipped: {metrics}')

    def time_pieces(self) -> dict[str, Any]:
        """Seconds of packing, of the transfer, and of the programs of a step one by one."""
        learner, state = self.learner, self.learner.state
        rows, denominator = training_rows(self._batch, self.settings.objective)
        one = {name: array[0] for name, array in rows.items()}
        scalars = training_scalars(denominator=denominator, version=0, temperature=1.0, weights_are_proximal=True)
        self._scalars = place(scalars, replicated(self._mesh))
        self._placed = self._layout.place(one)
        rate = place(np.float32(0.0), replicated(self._mesh))

        gradients: Any = None

        def differentiate() -> Any:
            nonlocal gradients
            gradients, *rest = learner.programs.run(
                'gradients', self._working, state.frozen, self._placed, self._scalars
            )
            return gradients, rest

        def apply() -> Any:
            state.params, state.optimizer, metrics, state.working = learner.programs.run(
                'apply_only_and_cast', state.params, state.optimizer, gradients, rate
            )
            self._working = state.working
            return state.params, metrics

        pieces = {
            'pack': measure_time(self._pack, _REPEATS),
            'rows': measure_time(lambda: training_rows(self._batch, self.settings.objective), _REPEATS),
            'transfer': measure_time(lambda: self._layout.place(one), _REPEATS),
            'cast': measure_time(lambda: learner.programs.run('cast', state.params), _REPEATS),
        }
        self._working = state.working = learner.programs.run('cast', state.params)
        pieces['forward_backward'] = measure_time(differentiate, _REPEATS)
        pieces['optimizer'] = measure_time(apply, _REPEATS)
        return pieces

    def time_forward(self) -> dict[str, Any]:
        """The forward pass alone."""
        state = self.learner.state
        run = lambda: self.learner.programs.run('logprobs', self._working, state.frozen, self._placed, self._scalars)
        return measure_time(run, _REPEATS)

    def time_attention(self) -> dict[str, Any]:
        """Attention of one layer, forward and backward."""
        return time_layer_attention(self.case.model, self._placed['segment_ids'], self.learner.attention)

    def time_head(self) -> dict[str, Any]:
        """Log-probs and entropies of the loss tokens from hidden states, forward and backward."""
        model, n = self.case.model, self.case.row_loss_tokens
        hidden = jax.random.normal(jax.random.key(SEED), (n, model.d_model), jnp.bfloat16)
        targets = self._placed['targets'].reshape(-1)

        def total(hidden: jax.Array, head: jax.Array) -> jax.Array:
            return token_logprobs(hidden, head, targets, 1.0)[0].sum()

        run = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))
        return measure_time(lambda: run(hidden, self._working['embedding']), _REPEATS)

    def rates(self, update_s: float, pieces: dict[str, Any]) -> dict[str, Any]:
        """Tokens a second and utilisation of the whole update, and of its programs alone."""
        tokens, flops = sum(self.lengths), train_flops(self.case.model, self.lengths, self.loss_tokens)
        step_s = sum(pieces[name]['median_s'] for name in ('cast', 'forward_backward', 'optimizer'))
        peak = find_peak(jax.local_devices()[0].device_kind)
        utilisation = lambda seconds: peak and flops / seconds / peak.bfloat16_flops
        return {
            'tokens_per_second': tokens / update_s,
            'mfu': utilisation(update_s),
            'programs_s': step_s,
            'programs_mfu': utilisation(step_s),
            'forward_backward_mfu': utilisation(pieces['forward_backward']['median_s']),
            'flops_per_second': flops / update_s,
        }

    def shares(self, pieces: dict[str, Any], attention: Any, head: Any, forward: Any) -> dict[str, Any]:
        """Parts of the passes; the layers' matrix products and everything between them are the rest."""
        whole = pieces['forward_backward']['median_s']
        layers = self.case.model.n_layers
        shares = {}
        if forward:
            shares |= {'forward': forward['median_s'] / whole, 'backward': 1 - forward['median_s'] / whole}
        if attention:
            shares['attention'] = layers * attention['forward_backward']['median_s'] / whole
        if head:
            shares['head'] = head['median_s'] / whole
        return shares

    def _pack(self) -> Sequence[Any]:
        advantages = [np.ones(len(group.trajectories), np.float32) for group in self._groups]
        return self._layout.pack(self._groups, advantages, n_minibatches=1)[0]


def time_layer_attention(model: ModelConfig, ids: jax.Array, impl: str, calls: int = 1) -> dict[str, Any]:
    """Attention of one layer over a row, forward and backward; `ids` [1, T], `calls` as for measure_time."""
    keys = jax.random.split(jax.random.key(SEED), 4)
    heads = (model.n_heads, model.n_kv_heads, model.n_kv_heads, model.n_heads)
    q, k, v, d_out = (
        jax.random.normal(key, (*ids.shape, n, model.head_dim), jnp.bfloat16)
        for key, n in zip(keys, heads, strict=True)
    )

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return packed_rows_attention(q, k, v, ids, ids, scale=model.head_dim**-0.5, impl=impl)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> Any:
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(d_out)

    forward, whole = jax.jit(attend), jax.jit(both)
    return {
        'forward': measure_time(lambda: forward(q, k, v), _REPEATS, calls=calls),
        'forward_backward': measure_time(lambda: whole(q, k, v, d_out), _REPEATS, calls=calls),
    }


def _optimizer(name: str) -> Optimizer:
    config = default_config()
    config.optimizer.name = name
    return build_optimizer(TrackedConfig(config))


def _groups(case: TrainCase) -> list[TrajectoryGroup]:
    """Every other answer is rewarded; log-probs are of uniform answers, close to what random weights give."""
    workload = case.workload
    answers = tuple(answer for group in workload.answers() for answer in group)
    uniform = -float(np.log(case.model.vocab_size))
    work = Work(
        prompts=workload.prompts(),
        answers=answers,
        behavior_logprobs=tuple(np.full(len(answer), uniform, np.float32) for answer in answers),
        rewards=np.arange(len(answers), dtype=np.float32) % 2,
        advantages=np.zeros(len(answers), np.float32),
        limit_tokens=workload.limit_tokens,
    )
    return make_groups(work)


def _segment_lengths(segment_ids: np.ndarray) -> list[int]:
    """Tokens of every segment of all rows, padding left out."""
    rows = segment_ids.reshape(-1, segment_ids.shape[-1])
    return [int(n) for row in rows for n in np.bincount(row)[1:] if n]


if __name__ == '__main__':
    run_part(measure)
