"""The README.md of an exported model: how to load it, and what is known of the run that made it."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import types
from collections.abc import Iterator, Sequence

from areal_jax import files
from areal_jax.app.workdir.provenance import package_versions
from areal_jax.app.workdir.run_directory import WEIGHTS, Values
from areal_jax.config.objectives import ObjectiveKind, describe_method, find_objective
from areal_jax.report.statistics import Interval, mean_interval, score_interval
from areal_jax.telemetry import facts as fact_file
from areal_jax.telemetry.facts import EVALUATIONS, EvaluationScores, read_scores

FILE = 'README.md'
_FIX = 'restore the file as the run wrote it'
_Row = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class ExportedModel:
    """What is exported, for the card."""

    values: Values  # the run's config, flat: 'run.steps' and so on
    step: int  # updates that made the weights
    dtype: str  # of the files
    parameters: int
    weights_sha256: str  # before a cast to `dtype`
    has_tokenizer: bool
    chats: bool  # whether the tokenizer has a chat template


def render_card(workdir: pathlib.Path, model: ExportedModel) -> str:
    """The card, from the config and from what the workdir holds: base weights, scores, commit and versions."""
    facts = _read(workdir / fact_file.FILE) if model.step == model.values['run.steps'] else {}
    tables = [
        ('The run', _run_rows(workdir, model)),
        ('Scores on held-out problems', _score_rows(workdir, model, facts)),
        ('Where it was made', _provenance_rows(facts)),
    ]
    parts = [
        _front_matter(model),
        f'# {_title(model)}',
        _loading(model),
        *(f'## {head}\n\n{_table(rows)}' for head, rows in tables if rows),
    ]
    if model.values['model.source'] != 'random':
        parts.append('The license is that of the weights that the run started from.')
    return '\n\n'.join(parts) + '\n'


def _front_matter(model: ExportedModel) -> str:
    method = _objective(model).method
    return f'---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- areal_jax\n- {method}\n---'


def _title(model: ExportedModel) -> str:
    done = f'{model.step} updates of {_objective(model).title}'
    return f'{model.parameters:,} parameters after {done} on {model.values["task.name"]}'


def _loading(model: ExportedModel) -> str:
    lines = ['from transformers import AutoModelForCausalLM, AutoTokenizer', '']
    lines.append("model = AutoModelForCausalLM.from_pretrained('.')  # the directory of this file")
    if not model.has_tokenizer:
        return (
            f'{_block([lines[0].removesuffix(", AutoTokenizer"), *lines[1:]])}\n\n'
            '**There is no tokenizer here.** The model was trained from nothing on symbols of its task, which no file '
            'of transformers describes: token 0 ends an answer, and the task of `areal_jax` says what the others mean.'
        )
    lines.append("tokenizer = AutoTokenizer.from_pretrained('.')")
    if model.chats:
        lines.append("chat = [{'role': 'user', 'content': 'What is 12 + 7?'}]")
        lines.append(
            "prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors='pt', "
            'return_dict=True)'
        )
    else:
        lines.append("prompt = tokenizer('1, 2, 3,', return_tensors='pt')")
    lines.append('answer = model.generate(**prompt, max_new_tokens=64, do_sample=False)')
    lines.append("print(tokenizer.decode(answer[0, prompt['input_ids'].shape[1]:]))")
    return _block(lines)


def _block(lines: Sequence[str]) -> str:
    return '\n'.join(['```python', *lines, '```'])


def _run_rows(workdir: pathlib.Path, model: ExportedModel) -> list[_Row]:
    v, objective = model.values, _objective(model)
    planned = '' if model.step == v['run.steps'] else f', of {v["run.steps"]} that the run was to make'
    rows = [
        ('weights at the start', _base(workdir, v)),
        ('task', _task(v)),
        ('updates', f'{model.step}{planned}'),
        ('seed', f'{v["run.seed"]}'),
    ]
    if not objective.generates:
        rows += [(f'{objective.given} an update', f'{v["learner.groups_per_update"]}'), ('loss', objective.name)]
    else:
        rows += [
            ('groups an update, answers a group', f'{v["learner.groups_per_update"]}, {v["rollout.group_size"]}'),
            ('sampling', _fields(v, 'rollout', ('temperature', 'top_k', 'top_p', 'max_new_tokens'))),
            ('staleness', _staleness(v)),
            ('loss', describe_method(_section(v, 'loss'))),
        ]
    rows.append(('optimizer', _fields(v, 'optimizer', ('name', 'learning_rate', 'schedule'))))
    if v['lora.rank']:
        rows.append(('adapters', f'{_fields(v, "lora", ("rank", "alpha"))}; merged into the weights'))
    rows.append(('weights here', f'{model.dtype}; sha256 {model.weights_sha256} before a cast'))
    return rows


def _section(values: Values, name: str) -> types.SimpleNamespace:
    """The fields of a section as attributes."""
    begin = f'{name}.'
    return types.SimpleNamespace(
        **{path.removeprefix(begin): v for path, v in values.items() if path.startswith(begin)}
    )


def _base(workdir: pathlib.Path, values: Values) -> str:
    if values['model.source'] == 'random':
        return f'drawn, family {values["model.family"]}, from the seed of the run'
    known = _read(workdir / WEIGHTS)
    digest = f'; sha256 of samples {known["samples_sha256"]}' if 'samples_sha256' in known else ''
    return f'`{values["model.path"]}` ({values["model.source"]}){digest}'


def _task(values: Values) -> str:
    details = [*values['task.datasets'], *([f'`{values["task.path"]}`'] if values['task.path'] else [])]
    return f'{values["task.name"]} ({", ".join(details)})' if details else values['task.name']


def _staleness(values: Values) -> str:
    if values['staleness.schedule'] != 'natural':
        return f'schedule {values["staleness.schedule"]}'
    eta = float(values['staleness.eta'])
    return 'eta unbounded' if math.isinf(eta) else f'eta {eta:g}'


def _fields(values: Values, section: str, names: Sequence[str]) -> str:
    return ', '.join(f'{name} {values[f"{section}.{name}"]}' for name in names)


def _score_rows(workdir: pathlib.Path, model: ExportedModel, facts: files.JsonObject) -> list[_Row]:
    if not _objective(model).generates:
        measured, pairs = facts.get('held_out_nll') or {}, facts.get('held_out_pairs') or {}
        if pairs:
            return [
                (f'chosen above rejected after {step} updates', f'{values["pair_accuracy"]:.4f}')
                for step, values in pairs.items()
            ]
        return [(f'nats per answer token after {step} updates', f'{nll:.4f}') for step, nll in measured.items() if nll]
    scores = read_scores(workdir / EVALUATIONS)
    if model.step != model.values['run.steps']:
        scores.pop('after', None)  # of other weights
    rows = [row for phase, found in scores.items() for row in _accuracy(phase, found)]
    missing = [('after', 'these weights were not measured')] if rows and 'after' not in scores else []
    return rows + missing


def _accuracy(phase: str, scores: EvaluationScores) -> Iterator[_Row]:
    if any(scores.sampled):
        yield f'{phase}, sampled', _format(score_interval(scores.sampled))
    if scores.greedy:
        yield f'{phase}, greedy', _format(mean_interval(scores.greedy))


def _format(interval: Interval) -> str:
    bounds = '' if interval.low is None else f' [{interval.low:.3f}, {interval.high:.3f}], 95%'
    return f'{interval.mean:.3f}{bounds} (n = {interval.n} problems)'


def _provenance_rows(facts: files.JsonObject) -> list[_Row]:
    described = lambda versions: ', '.join(f'{name} {version}' for name, version in versions.items())
    rows = []
    if facts.get('git_commit'):
        rows.append(('commit', str(facts['git_commit'])))
    if facts.get('versions'):
        rows.append(('trained with', described(facts['versions'])))
    rows.append(('exported with', described(package_versions())))
    return rows


def _objective(model: ExportedModel) -> ObjectiveKind:
    return find_objective(model.values['loss.objective'])


def _read(path: pathlib.Path) -> files.JsonObject:
    return files.read_json(path, _FIX) if path.exists() else {}


def _table(rows: Sequence[_Row]) -> str:
    return '\n'.join(['| | |', '|---|---|', *(f'| {name} | {value} |' for name, value in rows)])
