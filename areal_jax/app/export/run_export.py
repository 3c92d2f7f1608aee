"""Exports a version of a run as a directory of Hugging Face files, with its model card."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import threading
import types
from collections.abc import Iterator, Mapping, Sequence

import jax
from ml_collections import config_dict

from areal_jax import files
from areal_jax.app.export.finished_export import DIRECTORY, RECORD
from areal_jax.app.model.model import EarlierRun, Model, describe_model
from areal_jax.app.process.ending import StopRequests
from areal_jax.app.roles.roles import RoleProcess, await_controller, keep_name
from areal_jax.app.workdir.environment import package_versions
from areal_jax.app.workdir.mirrored_run import copy_export
from areal_jax.app.workdir.run_directory import CHECKPOINTS, WEIGHTS, Values, read_report
from areal_jax.checkpoint.mirror import MirrorError
from areal_jax.checkpoint.store import CheckpointError, CheckpointStore
from areal_jax.config import CONFIG, TrackedConfig, default_config, flatten
from areal_jax.config.kinds import find_server
from areal_jax.config.near_names import read_saved
from areal_jax.config.objectives import ObjectiveKind, describe_method, find_objective
from areal_jax.config.sources import SOURCES
from areal_jax.errors import UserError
from areal_jax.files import Announce, announce_nothing
from areal_jax.formats.hf_config import read_json
from areal_jax.formats.hf_directory import WEIGHT_DTYPES
from areal_jax.formats.hf_export import TOKEN_IDS, HfCompanions
from areal_jax.formats.safetensors_file import DIRECTORY as DIRECTORY_OF_CRITIC
from areal_jax.formats.safetensors_file import write_value_head
from areal_jax.hub import find_revision
from areal_jax.learning.weights import VALUE_HEAD
from areal_jax.models.weights import Params
from areal_jax.publication.export import export_hf
from areal_jax.publication.manifest import weights_sha256
from areal_jax.report.statistics import Interval, mean_interval, score_interval
from areal_jax.telemetry import facts as fact_file
from areal_jax.telemetry.facts import EVALUATIONS, EvaluationScores, read_scores
from areal_jax.text.file_tokenizers import GgufTokenizer, HfTokenizer

FILE = 'README.md'
_FIX = 'restore the file as the run wrote it'
_Row = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class ExportedModel:
    """Describes the exported weights for the model card."""

    values: Values  # the run's config, flat: 'run.steps' and so on
    step: int  # updates that made the weights
    dtype: str  # of the files
    parameters: int
    weights_sha256: str  # before a cast to `dtype`
    has_tokenizer: bool
    chats: bool  # whether the tokenizer has a chat template


def render_card(workdir: pathlib.Path, model: ExportedModel) -> str:
    """Renders the card from the config and the files of the workdir: base weights, scores, commit and versions."""
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
    return f'{model.parameters:,} parameters after {done} on {_name_task(model.values)}'


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
    commit = find_revision(pathlib.Path(str(known.get('path', ''))))
    revision = f', revision {commit}' if commit else ''
    return f'`{values["model.path"]}` ({values["model.source"]}{revision}){digest}'


def _name_task(values: Values) -> str:
    """The name of the task, or the sources of a mixture: 'a mixture of easy (jsonl), hard (jsonl)'."""
    if not (sources := _list_sources(values)):
        return str(values['task.name'])
    names = {source: values.get(f'{SOURCES}.{source}.name', values['task.name']) for source in sources}
    return f'a mixture of {", ".join(f"{source} ({name})" for source, name in names.items())}'


def _list_sources(values: Values) -> list[str]:
    return sorted({path.split('.')[2] for path in values if path.startswith(f'{SOURCES}.')})


def _task(values: Values) -> str:
    if sources := _list_sources(values):
        weights = ', '.join(f'{values[f"{SOURCES}.{source}.weight"]:g}' for source in sources)
        return f'{_name_task(values)}, weights {weights}'
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
    rows += [(f'revision of {field}', commit) for field, commit in facts.get('revisions', {}).items()]
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


# Exports the weights of a run as a directory that transformers, vLLM and SGLang load, with tokenizer and model card.
# The weights come from a checkpoint of any run, or from the learner of a run that has just finished.
# publication/export.py writes the files.


_GENERATION = 'generation_config.json'


class ExportError(UserError):
    """Weights that cannot be exported there or in that form; the message names the directory or the dtype."""


def export_run(
    workdir: pathlib.Path,
    out: pathlib.Path,
    *,
    step: int | None = None,
    dtype: str = 'float32',
    announce: Announce = announce_nothing,
) -> pathlib.Path:
    """Exports a checkpoint of a run to `out`, which appears in one step once it is complete; returns `out`.

    Args:
      workdir: of a run by rewards or by supervision, finished or not, or one of its checkpoints.
      step: the checkpoint's updates; None = the newest checkpoint that is intact.
      dtype: of the weights: float32, bfloat16 or float16.
      announce: is called with the bytes written and the total.

    Raises UserError for an `out` that is not empty, an unknown `dtype` or one that cannot hold the values, a directory
    without a run, a run without that checkpoint, a damaged checkpoint, and a disk that is full.
    """
    if dtype not in WEIGHT_DTYPES:
        raise ExportError(f'dtype={dtype!r} is unknown; use one of {", ".join(WEIGHT_DTYPES)}')
    _require_free(out)
    _write_checkpoint(out, workdir, step, dtype, announce)
    return out


def replace_export(workdir: pathlib.Path, step: int, dtype: str, announce: Announce = announce_nothing) -> None:
    """Writes WORKDIR/export from the checkpoint of a step, in place of an earlier export; raises UserError."""
    _write_checkpoint(workdir / DIRECTORY, workdir, step, dtype, announce)


def export_checkpoint(checkpoint: pathlib.Path, out: pathlib.Path, dtype: str) -> None:
    """Exports WORKDIR/checkpoints/NAME to `out`, in place of an earlier export; raises UserError."""
    _write_checkpoint(out, checkpoint, None, dtype)


def write_export(
    out: pathlib.Path,
    workdir: pathlib.Path,
    step: int,
    params: Params,
    digest: str,
    model: Model,
    dtype: str,
    announce: Announce = announce_nothing,
    critic: Params | None = None,
) -> None:
    """Writes the weights of a run with tokenizer, configs and model card; replaces an earlier export in `out`.

    Args:
      workdir: of the run; its config and, if they exist, its scores and facts go into the model card.
      step: updates that made the weights.
      params: in list form, adapters merged.
      digest: `weights_sha256` of `params`.
      model: the decoder and the tokenizer; its own weights are not used.
      critic: a value head, alone or with the weights of a separate critic model; it goes to `out`/critic.

    Raises PublicationError, HfError, and FileError for a damaged file of the workdir.
    """
    values = _read_values(workdir)
    tokenizer = model.tokenizer
    card = ExportedModel(
        values=values,
        step=step,
        dtype=dtype,
        parameters=model.decoder.parameter_count(),
        weights_sha256=digest,
        has_tokenizer=isinstance(tokenizer, (GgufTokenizer, HfTokenizer)),
        chats=isinstance(tokenizer, (GgufTokenizer, HfTokenizer)) and tokenizer.chats,
    )
    companions = _companions(values, model)
    record = _json({'step': step, 'weights_sha256': digest, 'dtype': dtype})
    texts = {**companions.texts, RECORD: record, FILE: render_card(workdir, card)}
    companions = dataclasses.replace(companions, texts=texts)
    export_hf(out, params, model.decoder.config, dtype=dtype, companions=companions, announce=announce)
    if critic is not None:
        _write_critic(out / DIRECTORY_OF_CRITIC, critic, model, dtype)


def _write_critic(out: pathlib.Path, critic: Params, model: Model, dtype: str) -> None:
    weights = {name: value for name, value in critic.items() if name != VALUE_HEAD}
    if weights:
        companions = HfCompanions(model.companions, _token_ids(model), {})
        export_hf(out, weights, model.decoder.config, dtype=dtype, companions=companions)
    write_value_head(out, critic[VALUE_HEAD])


def separates_head(config: TrackedConfig) -> bool:
    """Whether published versions also store lm_head although it is tied to the embedding.

    On a CPU, vllm 0.32 keeps a packed copy of the head. Its reload_weights packs only the tensors that it reads again,
    and it does not read a tied head, so later versions would be served with the head of the first.
    """
    kind = find_server(config.rollout.server)
    named = {url.partition('+')[0] for url in config.rollout.urls}
    clients = [client for client in kind.clients if client.name in named or not kind.takes_urls]
    return any(client.packs_tied_head for client in clients) and jax.default_backend() == 'cpu'


def build_companions(workdir: pathlib.Path, model: Model) -> HfCompanions:
    """Returns the tokenizer and sampling parameters of the run's weights, for a server that loads them."""
    return _companions(_read_values(workdir), model)


def _companions(values: Values, model: Model) -> HfCompanions:
    tokenizer = model.tokenizer
    texts = tokenizer.hf_files() if isinstance(tokenizer, (GgufTokenizer, HfTokenizer)) else {}
    generation = _json(_generation_config(values, model))
    return HfCompanions(model.companions, _token_ids(model), {**texts, _GENERATION: generation})


def _write_checkpoint(
    out: pathlib.Path, workdir: pathlib.Path, step: int | None, dtype: str, announce: Announce = announce_nothing
) -> None:
    run = EarlierRun(str(workdir), step, '--workdir')
    try:
        model = describe_model(run.config)
    except UserError as error:
        raise ExportError(
            f'{run.workdir / CONFIG} names the model that the run started from, which has its shape and tokenizer: '
            f'{error}. A relative path there is one of the directory in which the run was started'
        ) from error
    on_host = jax.sharding.SingleDeviceSharding(_host_device())
    params = run.read_weights(model.decoder, lambda tree: jax.tree.map(lambda _: on_host, tree))
    digest = weights_sha256(params)
    write_export(out, run.workdir, run.step, params, digest, model, dtype, announce, run.read_critic())


def _require_free(out: pathlib.Path) -> None:
    if out.exists() and not out.is_dir():
        raise ExportError(f'--out={str(out)!r} is a file: name a directory that is not there yet')
    if out.is_dir() and any(out.iterdir()):
        raise ExportError(f'--out={str(out)!r} exists and is not empty: name another directory, or remove it')


def _host_device() -> jax.Device:
    """A CPU device, so that weights which were trained over many devices need not fit on one of them."""
    try:
        return jax.local_devices(backend='cpu')[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        return jax.local_devices()[0]


def _read_values(workdir: pathlib.Path) -> Values:
    """Returns the run's config by 'section.field', with the default of each field that config.json lacks."""
    return {**dict(flatten(default_config())), **dict(flatten(read_saved(workdir / CONFIG, _FIX)))}


def _token_ids(model: Model) -> dict[str, int]:
    """Returns the ids of the special tokens by their names in config.json."""
    tokenizer = model.tokenizer
    roles = tokenizer.special_ids if isinstance(tokenizer, GgufTokenizer) else {'eos': tokenizer.eos_id}
    return {f'{role}_token_id': index for role, index in roles.items() if f'{role}_token_id' in TOKEN_IDS}


def _generation_config(values: Values, model: Model) -> dict[str, object]:
    """Returns generation_config.json: the ids that end generation and, for a run by rewards, its sampling.

    If the original model has such a file, its token ids are kept. Supervised training also keeps its sampling
    parameters. A run by rewards writes its own, because they define its policy.
    """
    ours, original = _token_ids(model), _read_original(model)
    ids = {name: value for name, value in original.items() if name.endswith('_token_id')}
    ends = [*model.tokenizer.end_ids, *_listed(original.get('eos_token_id'))]
    ends = list(dict.fromkeys(ends))
    ids = ours | ids | {'eos_token_id': ends if len(ends) > 1 else ends[0]}
    if not find_objective(values['loss.objective']).generates:
        return original | ids
    # transformers and vLLM read 0 as no cut, SGLang refuses it; all three read the size of the vocabulary as no cut
    top_k = values['rollout.top_k'] or model.decoder.config.vocab_size
    sampling = {'temperature': values['rollout.temperature'], 'top_k': top_k, 'top_p': values['rollout.top_p']}
    return ids | {'do_sample': True} | sampling


def _read_original(model: Model) -> dict[str, object]:
    """Reads generation_config.json of the Hugging Face directory of the tokenizer, with the end ids of config.json."""
    if model.companions is None:
        return {}
    config = read_json(model.companions / CONFIG)
    path = model.companions / _GENERATION
    found = read_json(path) if path.is_file() else {}
    ends = [*_listed(found.get('eos_token_id')), *_listed(config.get('eos_token_id'))]
    return found | ({'eos_token_id': ends} if ends else {})


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _json(value: Mapping[str, object]) -> str:
    return json.dumps(value, indent=1) + '\n'


EXPORTS = 'exports'  # in the workdir: a directory for each version, 'exports/16'
_LOOK_S = 1.0


def serve_exports(config: config_dict.ConfigDict, process: RoleProcess, interrupts: StopRequests) -> bool:
    """Exports until the run has finished (returns True), or until a signal comes before that (returns False).

    Raises LostPeerError if the controller does not appear, UserError for errors that the user can fix.
    """
    told = threading.Event()
    with keep_name(process, config):
        await_controller(process, config, config.distributed.command_deadline_s)
        run = config.run
        exporter = Exporter(process.workdir, run.export_every, run.steps, run.export_dtype, run.mirror)
        with interrupts.deferred(lambda number: told.set(), 'ending after this export'):
            return _export_until_told(exporter, told)


def _export_until_told(exporter: Exporter, told: threading.Event) -> bool:
    """Exports until the run has finished (returns True) or `told` is set before that (returns False)."""
    while True:
        has_finished = exporter.has_finished()  # asked before the search: no checkpoint is saved after it
        for path in exporter.find_due():
            if told.is_set() and not has_finished:
                return False
            exporter.export(path)
        if has_finished:
            return True
        if told.wait(_LOOK_S) and not exporter.has_finished():
            return False


class Exporter:
    """Writes WORKDIR/exports/VERSION for checkpoints of versions that are multiples of `every`, except the last.

    Args:
      steps: updates of the run; the weights of the last one are in WORKDIR/export.
      dtype: of the weights.
      mirror: run.mirror, which gets a copy of each; '' = none.
    """

    def __init__(self, workdir: pathlib.Path, every: int, steps: int, dtype: str, mirror: str = ''):
        self._workdir, self._every, self._steps, self._dtype = workdir, every, steps, dtype
        self._mirror = mirror
        self._store = CheckpointStore(workdir / CHECKPOINTS)
        self._given_up: set[str] = set()  # names of checkpoints

    def has_finished(self) -> bool:
        """Whether the run has finished, after which it saves no further checkpoint."""
        return read_report(self._workdir, self._steps) is not None

    def find_due(self) -> list[pathlib.Path]:
        """Returns the checkpoints whose weights are not exported yet, oldest version first.

        A version that a run saves again, after it returned to an earlier checkpoint, is exported again.
        """
        newest = {step: path for step, path in self._store.saves() if step % self._every == 0 and step < self._steps}
        due = [path for step, path in newest.items() if not self._is_exported(step, path)]
        return [path for path in due if path.name not in self._given_up]

    def export(self, path: pathlib.Path) -> None:
        """Exports a checkpoint. Prints a warning on failure (the run removed the checkpoint, the disk is full)."""
        step = int(path.name.split('_')[1])
        out = self._out(step)
        out.parent.mkdir(exist_ok=True)
        try:
            export_checkpoint(path, out, self._dtype)
        except UserError as error:
            self._given_up.add(path.name)
            fix = '; raise checkpoint.keep' if isinstance(error, CheckpointError) else ''
            print(f'warning: version {step} is not exported: {error}{fix}', flush=True)
        else:
            print(f'version {step} is in {out}', flush=True)
            if self._mirror:
                self._copy(out, step)

    def _copy(self, out: pathlib.Path, step: int) -> None:
        try:
            copy_export(self._mirror, self._workdir, out, step)
        except MirrorError as error:
            print(f'warning: version {step} is not in run.mirror: {error}', flush=True)

    def _is_exported(self, step: int, path: pathlib.Path) -> bool:
        """Whether the export is no older than the checkpoint: both are on one file system, and so share one clock."""
        try:
            return (self._out(step) / RECORD).stat().st_mtime >= path.stat().st_mtime
        except FileNotFoundError:  # not exported yet; or the checkpoint was just removed, and the next search shows it
            return False

    def _out(self, step: int) -> pathlib.Path:
        return self._workdir / EXPORTS / str(step)
