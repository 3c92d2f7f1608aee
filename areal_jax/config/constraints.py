"""Rules that join several fields of the config. Each value is legal alone; together they cannot run.

`config.validate` raises the first sentence, and so does `config.validate_evaluation`, to which only some of the rules
apply. Rules of a single field are in declarations.py, rules of objectives in objective_constraints.py, and other rules
of one section in the file of that section.
"""

from __future__ import annotations

from collections.abc import Iterator

from ml_collections import config_dict

from areal_jax.config.addresses import split_address
from areal_jax.config.agent_fields import (
    find_agent_problems,
    find_code_problems,
    find_sandbox_problems,
    find_training_problems,
)
from areal_jax.config.cluster import parse_engines, parse_learner
from areal_jax.config.declarations import (
    find_evaluation_problem,
    find_friction_problems,
    find_model_problems,
    find_simulation_problems,
)
from areal_jax.config.generation import (
    cuts_softmax,
    find_engine_problems,
    find_quantization_problems,
    find_route_problems,
    find_server_problems,
    find_sparing_problems,
)
from areal_jax.config.kinds import DEVICE, IN_PROCESS, find_channel, find_server, name_launched
from areal_jax.config.loss import find_critic_problems
from areal_jax.config.objective_constraints import find_group_problems, find_objective_problems, find_reference_problems
from areal_jax.config.objectives import find_objective
from areal_jax.config.splits import find_reallocation_problems
from areal_jax.config.training import (
    find_balance_problems,
    find_block_problems,
    find_brake_problems,
    find_client_problems,
    find_device_problems,
    find_room_problems,
    find_row_problems,
    find_schedule_problems,
    find_staleness_problems,
)


def find_record_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Yields a sentence if the channel's records cannot be sent or read, or publication.listen is malformed."""
    setting = f'publication.channel={c.publication.channel!r}'
    if c.publication.listen and split_address(c.publication.listen) is None:
        yield (
            f'publication.listen={c.publication.listen!r} must be a host or host:port, with brackets around a host of '
            'IPv6: name an interface of this machine'
        )
    if not find_channel(c.publication.channel).sends_records:
        return
    if not find_server(c.rollout.server).reads_records:
        yield (
            f'{setting} with rollout.server={c.rollout.server!r}: these servers load directories of files; use '
            "publication.channel='files', or rollout.server='own'"
        )
    if parse_learner(c.cluster.learner).hosts is not None:
        yield (
            f'{setting} with cluster.learner={c.cluster.learner!r}: learners in roles or over several processes write '
            "files; use publication.channel='files', or a learner in one process"
        )


def find_delta_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Yields a sentence for each setting with which deltas between versions cannot be sent or read."""
    publication, server = c.publication, c.rollout.server
    if not publication.delta:
        return
    for path, value, fits, why in (
        (
            *('publication.channel', publication.channel, find_channel(publication.channel).has_deltas),
            "it carries whole versions only; use publication.channel='files'",
        ),
        (
            *('publication.dtype', publication.dtype, publication.dtype != 'float32'),
            '99.8 % of the elements of float32 weights change in each update, so that no delta is smaller; use '
            "publication.dtype='bfloat16'",
        ),
        (
            *('cluster.learner', c.cluster.learner, parse_learner(c.cluster.learner).hosts is None),
            'each process writes its own leaves, and a delta needs the version before in one process; use a learner '
            'in the process of the trainer',
        ),
        (
            *('rollout.server', server, find_server(server).reads_deltas),
            "these servers load whole directories; use rollout.server='own'",
        ),
    ):
        if not fits:
            yield f'publication.delta=True with {path}={value!r}: {why}, or publication.delta=False'


def find_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """A sentence for each rule that `c` breaks: the fields, their values and the fix."""
    if not find_objective(c.loss.objective).generates:
        yield from _sft_problems(c)
    else:
        parse_engines(c.cluster.engines)
        yield from find_staleness_problems(c)
        yield from find_group_problems(c)
        yield from _signal_problems(c)
        yield from find_objective_problems(c)
        yield from _capacity_problems(c)
        yield from find_room_problems(c)
        yield from _evaluation_problems(c)
        yield from find_server_problems(c)
        yield from find_sparing_problems(c)
        yield from find_record_problems(c)
        yield from find_quantization_problems(c)
        yield from find_route_problems(c)
        yield from find_balance_problems(c)
        yield from find_delta_problems(c)
        yield from find_friction_problems(c)
        yield from find_agent_problems(c)
    yield from find_simulation_problems(c)
    yield from find_training_problems(c)
    yield from find_reference_problems(c)
    yield from find_critic_problems(c)
    yield from find_block_problems(c)
    yield from find_client_problems(c)
    yield from find_task_problems(c)
    yield from _file_problems(c)
    yield from find_device_problems(c)
    yield from find_reallocation_problems(c)
    yield from _telemetry_problems(c)
    yield from _export_problems(c)
    yield from find_schedule_problems(c)
    yield from find_row_problems(c)


def find_evaluation_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Yields a sentence for each rule that a config for evaluation alone breaks: rules of training do not apply."""
    parse_engines(c.cluster.engines)
    yield from find_evaluation_problem(c)
    yield from find_agent_problems(c)
    yield from find_engine_problems(c)
    yield from find_quantization_problems(c)
    yield from find_task_problems(c)
    if not c.evaluation.problems:
        yield 'evaluation.problems=0 leaves nothing to evaluate; set the number of problems'


def _sft_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    if c.sft.evaluate_every and not c.evaluation.problems:
        yield (
            f'sft.evaluate_every={c.sft.evaluate_every} measures nothing with evaluation.problems=0; set '
            'evaluation.problems, or sft.evaluate_every=0'
        )
    yield from find_brake_problems(c)


def _evaluation_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    if c.evaluation.every and not c.evaluation.problems:
        yield (
            f'evaluation.every={c.evaluation.every} measures nothing with evaluation.problems=0; set '
            'evaluation.problems, or evaluation.every=0'
        )
    if (own := c.evaluation.engines) and not c.evaluation.every:
        yield f'evaluation.engines={own} sets engines aside for evaluation.every=0; use evaluation.engines=0'
    elif own:
        yield from _evaluation_engine_problems(c)


def _evaluation_engine_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    own, engines = c.evaluation.engines, parse_engines(c.cluster.engines).count
    if parse_learner(c.cluster.learner).hosts is None or find_server(c.rollout.server).launch is None:
        yield (
            f'evaluation.engines={own} with rollout.server={c.rollout.server!r} and cluster.learner='
            f"{c.cluster.learner!r}: servers are set aside in runs in roles; use cluster.learner='hosts=1 x ...' and "
            f'rollout.server={name_launched()}, or evaluation.engines=0'
        )
    elif own >= engines:
        yield (
            f'evaluation.engines={own} leaves none of the {engines} engines of cluster.engines={c.cluster.engines!r} '
            'to training; raise cluster.engines'
        )


def _signal_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Yields a sentence for sampling that biases the training signal unintentionally."""
    if cuts_softmax(c) and c.loss.truncated_sampling == 'refuse':
        yield (
            f'rollout.top_k={c.rollout.top_k} and rollout.top_p={c.rollout.top_p} draw from a part of the softmax, but '
            "the learner's log-probs are those of all of it: set rollout.top_k=0 and rollout.top_p=1, or accept a bias "
            "by the mass kept with loss.truncated_sampling='full_softmax' (it is 'refuse')"
        )


def _capacity_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Yields a sentence if the buffer cannot hold a batch, or an engine's slot an answer."""
    learner = c.learner
    if c.buffer.capacity < learner.groups_per_update:
        yield (
            f'buffer.capacity={c.buffer.capacity} can never hold learner.groups_per_update='
            f'{learner.groups_per_update} groups; raise the capacity'
        )
    yield from find_engine_problems(c)


def find_task_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Yields a sentence for each broken rule of task and model alone."""
    if c.task.name == 'jsonl' and not c.task.path:
        yield "task.name='jsonl' needs task.path: a file, or hf:ORG/NAME, with question and answer (sft: or messages)"
    if c.task.columns and c.task.name not in ('jsonl', 'code'):
        yield f'task.columns is read by the tasks jsonl and code alone, not by {c.task.name!r}: remove it'
    for name, column in c.task.columns.items():
        if not isinstance(column, str) or not column:
            yield f'task.columns.{name}={column!r} must be the name of a column'
    if c.task.name == 'jsonl' and c.task.answer == 'math' and c.task.verifier == 'inline':
        yield (
            "task.verifier='inline' cannot end a comparison that hangs, which task.answer='math' needs; use "
            "task.verifier='process'"
        )
    yield from find_sandbox_problems(c)
    yield from find_code_problems(c)
    if c.task.filter == 'success_rate' and c.task.filter_low > c.task.filter_high:
        yield (
            f'task.filter_low={c.task.filter_low} above task.filter_high={c.task.filter_high} drops every group; lower '
            'task.filter_low or raise task.filter_high'
        )
    yield from find_model_problems(c)


def _file_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Yields a sentence for each setting that writes a plain decoder to files: Hugging Face has no format for it."""
    if c.model.source != 'random' or c.model.family != 'plain':
        return
    channel, server = c.publication.channel, c.rollout.server
    for path, value, fix, asks in (
        ('run.export', c.run.export, False, c.run.export),
        ('publication.channel', channel, DEVICE.name, find_channel(channel).writes_files),
        ('rollout.server', server, IN_PROCESS.name, not find_server(server).in_process),
    ):
        if asks:
            yield (
                f"model.family='plain' cannot be written for other programs, which {path}={value!r} asks for: use "
                f'{path}={fix!r}'
            )


def _export_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Yields a sentence if exports during training have no exporter role, or no checkpoint to be made from."""
    if not (every := c.run.export_every):
        return
    if parse_learner(c.cluster.learner).hosts is None:
        yield (
            f'run.export_every={every} with cluster.learner={c.cluster.learner!r}: runs in roles have an exporter; '
            "use cluster.learner='hosts=1 x ...', or run.export_every=0 and python -m areal_jax.main_export"
        )
    elif not c.checkpoint.every or every % c.checkpoint.every:
        yield (
            f'run.export_every={every} must be a multiple of checkpoint.every={c.checkpoint.every}: checkpoints are '
            'what is exported'
        )


def _telemetry_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    steps = tuple(c.telemetry.profile_steps)
    if len(steps) > 2:
        yield f'telemetry.profile_steps={steps} must be the first and the last update of the trace, one update, or ()'
    elif steps and steps[-1] > c.run.steps:
        yield (
            f'telemetry.profile_steps={steps} ends after the last update, run.steps={c.run.steps}; lower it, or raise '
            'run.steps'
        )
