"""A whole asynchronous run with random weights of the 0.5b shape on one GPU: who was busy, and what bounds it.

    python -m benchmarks.gpu_parts.run [--tiny] OUT

Task: token_reversal, whose prompts have 17 tokens. The vocabulary has the size of the shape's, so random weights answer
with random tokens up to the limit, the rewards are 0, and every update trains with advantages of 0: the arithmetic is
the same as in any run, and the weights do not change.
"""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

from ml_collections import config_dict

from areal_jax.app.model.model import Model
from areal_jax.app.parts.compilations import print_warnings
from areal_jax.app.parts.part_settings import build_allocation
from areal_jax.app.run.loop import Loop
from areal_jax.app.run.own_site import build_own_loop, load_model, require_here
from areal_jax.app.run.run import Run, RunContext, RunKind
from areal_jax.config import default_config
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.tasks.token_reversal import characters
from areal_jax.telemetry.facts import RunFacts
from areal_jax.text.tokenizer import CharacterTokenizer
from benchmarks.gpu_parts.cells import Cells, run_part
from benchmarks.gpu_parts.compile import Compilations
from benchmarks.gpu_parts.shapes import SHAPES, TINY

_REPORTED = (
    *('steps', 'wall_seconds', 'window_seconds', 'time', 'busy', 'publish_pause_seconds', 'throughput', 'token_age'),
    *('versions_per_trajectory', 'interruptions', 'mismatch', 'tokens', 'optimizer_steps', 'compilations'),
    *('event_loop_lag_seconds', 'peak_memory_bytes', 'admission_held', 'cause_of_gap', 'warnings', 'energy'),
)
_SIZES = ('n_layers', 'd_model', 'd_ff', 'n_heads', 'n_kv_heads', 'head_dim', 'rope_theta')
_FIRST_LETTER = 0x4E00  # of as many characters as the vocabulary needs; those up to the surrogates are left out
_AFTER_SURROGATES = 0xE000


def measure(cells: Cells, *, tiny: bool) -> None:
    shape = TINY if tiny else SHAPES['0.5b']
    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(folder, 'run')
        session = open_run(build_config(shape, _fields(tiny), tiny), shape, workdir)
        cells.add('case', describe(session))
        try:
            with Compilations() as compilations:
                report = session.train()
        finally:
            keep_records(workdir)
        if report is None:
            raise RuntimeError('the run was stopped')
        alone = RunFacts.load(workdir).alone_seconds
    cells.add('compile', compilations.numbers())
    cells.add('report', pick(report))
    cells.add('limit', _limit(report, alone))


def open_run(config: config_dict.ConfigDict, shape: ModelConfig, workdir: pathlib.Path) -> Run[Loop]:
    """A run of random weights that has not begun."""
    build = functools.partial(build_own_loop, load=functools.partial(_draw_model, shape=shape))
    kind: RunKind[Loop] = RunKind(require_here, print_warnings, build)
    return Run(kind, config, workdir, source='benchmarks/gpu_parts/run.py')


def pick(report: dict[str, Any]) -> dict[str, Any]:
    """The part of a report that is kept."""
    return {name: report[name] for name in _REPORTED}


def keep_records(workdir: pathlib.Path, name: str = '') -> None:
    """Copies the log, the metrics and all other files that are text to the folder of --keep; no weights."""
    if not (keep := os.environ.get('AREAL_JAX_GPU_KEEP')):
        return
    folder = pathlib.Path(keep, name)
    folder.mkdir(parents=True, exist_ok=True)
    for path in workdir.iterdir():
        if path.suffix in ('.json', '.jsonl', '.html', '.md'):
            shutil.copy(path, folder)


def _draw_model(context: RunContext, shape: ModelConfig) -> Model:
    """Random weights of any shape, and a vocabulary that its tokenizer has a character for."""
    load_model(context)  # of the config's own vocabulary, for the fields that it reads
    decoder, known = Decoder(shape), characters(context.config.task.symbols)
    others = (chr(code) for code in _codes(shape.vocab_size - 1 - len(known)))
    tokenizer = CharacterTokenizer(known + ''.join(others))
    return Model(decoder, decoder.init(context.config.run.seed), tokenizer)


def _codes(count: int) -> list[int]:
    """Code points of so many characters."""
    before = range(_FIRST_LETTER, 0xD800)
    after = range(_AFTER_SURROGATES, _AFTER_SURROGATES + max(0, count - len(before)))
    return [*before[:count], *after]


def build_config(shape: ModelConfig, fields: Mapping[str, object], tiny: bool) -> config_dict.ConfigDict:
    """The config of a run on one device that neither evaluates nor exports, with `fields` in addition."""
    config = default_config()
    config.update_from_flattened_dict(
        {
            'run.export': False,
            'run.seed': int(os.environ.get('AREAL_JAX_GPU_SEED', 0)),
            'model.family': 'qwen2',
            **{f'model.{name}': getattr(shape, name) for name in _SIZES},
            'task.length': 4 if tiny else 16,
            'rollout.decode_steps': 4 if tiny else 16,
            'rollout.block_tokens': 16 if tiny else 64,
            'learner.filter_equal_rewards': False,
            'learner.dtype': 'float32' if tiny else 'bfloat16',
            'learner.layers': 'stacked',
            'publication.dtype': 'float32' if tiny else 'bfloat16',
            'evaluation.problems': 0,
            'telemetry.progress': False,
            'telemetry.tensorboard': False,
            'telemetry.plots': False,
            **fields,
        }
    )
    return config


def _fields(tiny: bool) -> dict[str, object]:
    return {
        'run.steps': 3 if tiny else 12,
        'rollout.slots': 8 if tiny else 64,
        'rollout.context_tokens': 32 if tiny else 544,
        'rollout.prefill_buckets': (64,) if tiny else (256, 4096),
        'rollout.group_size': 4 if tiny else 8,
        'rollout.max_new_tokens': 16 if tiny else 512,
        'rollout.max_running_groups': 4 if tiny else 24,
        'staleness.eta': 2.0,
        'buffer.capacity': 8 if tiny else 32,
        'learner.groups_per_update': 2 if tiny else 8,
        'learner.row_tokens': 128 if tiny else 16_384,
        'learner.row_loss_tokens': 128 if tiny else 16_384,
        'telemetry.energy': 'auto',
    }


def describe(session: Run[Loop]) -> dict[str, Any]:
    config = session.context.config
    sections = config.as_dict()
    return {
        'parameters': session.site.model.decoder.parameter_count(),
        'attention': session.site.learner.attention,
        'devices': build_allocation(config).describe(),
        'config': {name: sections[name] for name in ('run', 'rollout', 'staleness', 'learner')},
    }


def _limit(report: dict[str, Any], alone: Mapping[str, float | None]) -> dict[str, Any]:
    """Seconds of an update: achieved, the report's ideal, and generation and training alone."""
    time = report['time']
    ideal, achieved = time['ideal'], time['achieved']
    return {
        'achieved_s': achieved,
        'ideal_s': ideal,
        'ideal_rule': time['ideal_rule'],
        'share_of_ideal': ideal and achieved and ideal / achieved,
        'alone_s': dict(alone),
    }


if __name__ == '__main__':
    run_part(measure)
