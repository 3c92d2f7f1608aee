"""The section `model` of the config, and the rules of its fields."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

from ml_collections import config_dict

from areal_jax.config.fields import Choice, Field, Integer, Path, Real, Text
from areal_jax.config.ranges import COUNT, COUNT_OR_OFF, POSITIVE

EXPERT_FAMILIES = ('qwen3_moe', 'mixtral', 'olmoe')  # of random models

MODEL_FIELDS: dict[str, Field] = {
    'source': Choice('random', ('random', 'gguf', 'hf', 'run'), 'a GGUF file, Hugging Face files, or another run'),
    'path': Path('', "gguf: a file or 'package:NAME/FILE'; hf: a directory; run: a workdir or one of its checkpoints"),
    'chat_template': Path('', "a jinja2 file, or 'package:configs/templates/hermes.jinja'; '' = that of the weights"),
    'ends': Choice(
        'all', ('all', 'eos'), 'gguf, hf: of the ids that end an answer, all that the files name, or eos_token alone'
    ),
    'template_date': Text(
        '', "gguf, hf: the day that templates see, '2026-11-30'; 'off' = none; '' = today, and a run keeps its first"
    ),
    'characters': Text('', "random: one token each; '' = those of the task token_reversal"),
    'family': Choice(
        'llama',
        ('llama', 'qwen2', 'qwen3', *EXPERT_FAMILIES, 'plain'),
        'random: qwen2 = biases of q, k, v; qwen3 = norms of q, k; plain = learned positions, ReLU, no final norm; '
        'with experts: docs/moe.md',
    ),
    'outputs': Choice('all', ('all', 'symbols'), 'plain: tokens of an answer; symbols = token_reversal'),
    'n_layers': Integer(2, COUNT, 'random: layers of the decoder'),
    'd_model': Integer(64, COUNT, 'random: width of the residual stream'),
    'd_ff': Integer(128, COUNT, 'random: width of the MLP'),
    'experts': Integer(0, COUNT_OR_OFF, 'random: experts of a layer in place of the MLP; 0 = none'),
    'experts_per_token': Integer(2, COUNT, 'random: experts that a token reaches'),
    'd_expert': Integer(64, COUNT, 'random: width of an expert'),
    'n_heads': Integer(4, COUNT, 'random: query heads'),
    'n_kv_heads': Integer(2, COUNT, 'random: key-value heads, a divisor of n_heads'),
    'head_dim': Integer(16, COUNT, 'random: width of a head, an even number'),
    'rope_theta': Real(10000.0, POSITIVE, 'random: base of the rotary angles'),
    'init_scale': Real(1.0, POSITIVE, 'random: multiplies the standard deviation of every matrix'),
    'embedding_scale': Real(1.0, POSITIVE, 'random: multiplies that of embedding and positions as well'),
}


def find_model_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """A sentence for each rule that a config breaks."""
    model = c.model
    if model.source == 'gguf' and not model.path:
        yield "model.source='gguf' needs model.path: a file, or package:NAME/FILE inside an installed package"
    if model.source == 'hf' and not model.path:
        yield "model.source='hf' needs model.path: a directory with config.json and safetensors"
    if model.source == 'run' and not model.path:
        yield "model.source='run' needs model.path: the --workdir of another run"
    if model.source == 'random' and model.chat_template:
        yield f"model.chat_template={model.chat_template!r} is of no use with model.source='random': remove it"
    if model.template_date not in ('', 'off') and not _is_day(model.template_date):
        yield f"model.template_date={model.template_date!r} must be a day such as '2026-11-30', 'off', or ''"
    if model.source == 'random' and len(set(model.characters)) != len(model.characters):
        yield f'model.characters={model.characters!r} must have each character once'
    if model.source == 'random' and model.n_heads % model.n_kv_heads:
        yield f'model.n_heads={model.n_heads} must be a multiple of model.n_kv_heads={model.n_kv_heads}'
    if model.source == 'random' and model.head_dim % 2:
        yield f'model.head_dim={model.head_dim} must be even: rotary positions need pairs'
    if model.source == 'random' and model.outputs == 'symbols':
        yield from _symbol_problems(c)
    if model.source == 'random':
        yield from _expert_problems(c)
    if model.source == 'random' and model.family == 'plain' and c.lora.rank and 'gate' in c.lora.targets:
        yield f"lora.targets={tuple(c.lora.targets)} names 'gate', which model.family='plain' does not have: remove it"


def _is_day(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _expert_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    model = c.model
    if (model.family in EXPERT_FAMILIES) != bool(model.experts):
        families = ', '.join(EXPERT_FAMILIES)
        yield (
            f'model.experts={model.experts} does not fit model.family={model.family!r}: the families with experts are '
            f'{families}'
        )
    elif model.experts and model.experts_per_token > model.experts:
        yield f'model.experts_per_token={model.experts_per_token} is more than model.experts={model.experts}: lower it'


def _symbol_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """A head whose rows are the symbols of token_reversal."""
    for path, value, fix in (
        ('model.family', c.model.family, 'plain'),
        ('model.characters', c.model.characters, ''),
        ('task.name', c.task.name, 'token_reversal'),
        ('rollout.ignore_eos', c.rollout.ignore_eos, True),
    ):
        if value != fix:
            yield f"model.outputs='symbols' leaves no other token to answer with: use {path}={fix!r}, not {value!r}"
