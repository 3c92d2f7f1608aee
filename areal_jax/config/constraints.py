"""Rules that join several fields of the config. Each value is legal alone; together they cannot run.

`config.validate` raises the first sentence, and so does `config.validate_evaluation`, for which only some of the rules
hold. The rules of a single field are in declarations.py, those of the optimizer in optimizer.py, those of objectives in
objective_constraints.py.
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
    find_critic_problems,
    find_evaluation_problem,
    find_friction_problems,
    find_model_problems,
    find_simulation_problems,
)
from areal_jax.config.kinds import DEVICE, IN_PROCESS, SERVERS, find_channel, find_server, name_launched
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
    """Who can send versions as records, and who can read them."""
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
    """Who cannot send or take what changed between two versions."""
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


MOST_PREFILL_BUCKETS = 5  # an engine has 16 programs at most


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
        yield from _server_problems(c)
        yield from _sparing_problems(c)
        yield from find_record_problems(c)
        yield from _quantization_problems(c)
        yield from _route_problems(c)
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
    """The same for a model that is only evaluated: rules of training do not hold."""
    parse_engines(c.cluster.engines)
    yield from find_evaluation_problem(c)
    yield from find_agent_problems(c)
    yield from _engine_problems(c)
    yield from _quantization_problems(c)
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


def _server_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """What engines in other processes cannot do."""
    rollout, setting = c.rollout, f'rollout.server={c.rollout.server!r}'
    kind = find_server(rollout.server)
    if rollout.urls and not kind.takes_urls:
        yield f"rollout.urls={tuple(rollout.urls)} with {setting} would not be used; use rollout.server='external'"
    if kind.in_process:
        return
    if kind.takes_urls and not rollout.urls:
        addresses = ' or '.join(f"'{client.name}+http://host:port'" for client in kind.clients)
        yield f'{setting} needs rollout.urls: {addresses} of each server'
    if c.run.clock == 'virtual' and not c.simulation.prices:
        yield (
            f"run.clock='virtual' with {setting}: servers answer in real time; use run.clock='real', or "
            "rollout.server='in_process'"
        )
    if not find_channel(c.publication.channel).reaches_processes:
        yield (
            f'publication.channel={c.publication.channel!r} with {setting}: it reaches engines in the process of the '
            "trainer only, and servers load weights from disk; use publication.channel='files'"
        )
    without = "or rollout.server='in_process'"
    if c.evaluation.every and not c.evaluation.engines:
        yield (
            f'evaluation.every={c.evaluation.every} with {setting}: servers do not keep the weights of an earlier '
            'version beside those of training; set one of cluster.engines aside with evaluation.engines=1 (runs in '
            f'roles), or use evaluation.every=0, {without}'
        )
    if c.staleness.schedule != 'natural':
        yield (
            f'staleness.schedule={c.staleness.schedule!r} with {setting}: servers do not go back to an earlier version '
            f"of the weights; use staleness.schedule='natural', {without}"
        )
    if rollout.kv_policy != 'recompute' and not kind.keeps_kv:
        yield (
            f'rollout.kv_policy={rollout.kv_policy!r} with {setting}: these servers are paused to load weights, which '
            "ends answers and their KV; use rollout.kv_policy='recompute', or rollout.server='own'"
        )
    if (rollout.top_k > 0 or rollout.top_p < 1) and not kind.gives_sampling_logprobs:
        yield (
            f'rollout.top_k={rollout.top_k} and rollout.top_p={rollout.top_p} with {setting}: these servers give no '
            "log-probs of the part of the softmax that is sampled; use top_k=0 and top_p=1, or rollout.server='own'"
        )
    groups = parse_engines(c.cluster.engines).groups
    if any(group.expert > 1 for group in groups) and not kind.cuts_experts:
        uncut = ' + '.join(f'{group.count} x tensor={group.devices_each}' for group in groups)
        yield (
            f'cluster.engines={c.cluster.engines!r} with {setting}: these servers are not asked to cut experts; use '
            f"'{uncut}', or rollout.server='own'"
        )


def _sparing_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """What does not go with leaving out a class of engines at a publication."""
    if c.rollout.slow_engines != 'spare':
        return
    server, schedule, reallocate = c.rollout.server, c.staleness.schedule, c.cluster.reallocate
    for path, value, fits, why in (
        ('rollout.server', server, find_server(server).in_process, 'servers are weighed by their speed'),
        ('staleness.schedule', schedule, schedule == 'natural', 'in lock-step a publication loads no weights'),
        ('cluster.reallocate', reallocate, reallocate == 'off', 'the engines that come and go are of one class'),
    ):
        if not fits:
            yield f"rollout.slow_engines='spare' with {path}={value!r}: {why}; use rollout.slow_engines='use'"


def _quantization_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """What engines with weights in 8 bits do not take; the fix is always to leave them as published."""
    if c.rollout.weights != 'int8':
        return
    server = c.rollout.server
    for path, value, fix, fits, why in (
        (
            *('rollout.server', server, IN_PROCESS.name, find_server(server).in_process),
            'servers decode with the weights that they load',
        ),
        (
            *('publication.dtype', c.publication.dtype, 'float32', c.publication.dtype == 'float32'),
            'float32 is what is quantized',
        ),
        ('lora.rank', c.lora.rank, 0, not c.lora.rank, 'adapters are not quantized'),
    ):
        if not fits:
            yield (
                f"rollout.weights='int8' with {path}={value!r}: {why}; use {path}={fix!r}, or "
                "rollout.weights='published'"
            )


def _route_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Routing replay without anything to replay."""
    rollout, kind = c.rollout, find_server(c.rollout.server)
    if c.learner.routes == 'replay' and not rollout.record_routes:
        yield (
            "learner.routes='replay' follows the experts that engines recorded, and rollout.record_routes=False: set "
            "it to True, or use learner.routes='live'"
        )
    if not rollout.record_routes:
        return
    if c.model.source == 'random' and not c.model.experts:
        yield (
            'rollout.record_routes=True needs a model with experts, and model.experts=0: name a family with experts '
            '(docs/moe.md), or set rollout.record_routes=False'
        )
    if not kind.gives_routes:
        able = ' or '.join(repr(other.name) for other in SERVERS.values() if other.gives_routes)
        yield (
            f'rollout.record_routes=True with rollout.server={rollout.server!r}: these servers do not tell which '
            f'experts a token has reached; use {able}, or rollout.record_routes=False'
        )


def _signal_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Answers that give an unintended, biased signal."""
    if (c.rollout.top_k > 0 or c.rollout.top_p < 1) and c.loss.truncated_sampling == 'refuse':
        yield (
            f'rollout.top_k={c.rollout.top_k} and rollout.top_p={c.rollout.top_p} draw from a part of the softmax, but '
            "the learner's log-probs are those of all of it: set rollout.top_k=0 and rollout.top_p=1, or accept a bias "
            "by the mass kept with loss.truncated_sampling='full_softmax' (it is 'refuse')"
        )


def _capacity_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """What must hold something else: the buffer a batch, a slot an answer."""
    learner = c.learner
    if c.buffer.capacity < learner.groups_per_update:
        yield (
            f'buffer.capacity={c.buffer.capacity} can never hold learner.groups_per_update='
            f'{learner.groups_per_update} groups; raise the capacity'
        )
    yield from _engine_problems(c)


def _engine_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """What an engine must hold: a prompt beside an answer, and one sequence in its cache."""
    rollout = c.rollout
    if rollout.max_new_tokens >= rollout.context_tokens:
        yield (
            f'rollout.max_new_tokens={rollout.max_new_tokens} leaves no room for a prompt in rollout.context_tokens='
            f'{rollout.context_tokens}; raise the context'
        )
    if not rollout.prefill_buckets:
        yield (
            'rollout.prefill_buckets=() leaves no program to prefill prompts of up to rollout.context_tokens='
            f'{rollout.context_tokens} tokens; name at least one number of tokens'
        )
    if len(rollout.prefill_buckets) > MOST_PREFILL_BUCKETS:
        yield (
            f'rollout.prefill_buckets={tuple(rollout.prefill_buckets)} has {len(rollout.prefill_buckets)} sizes, each '
            f'of which is one or two programs to compile; name at most {MOST_PREFILL_BUCKETS}'
        )
    if rollout.block_tokens > rollout.context_tokens:
        yield (
            f'rollout.block_tokens={rollout.block_tokens} exceeds rollout.context_tokens={rollout.context_tokens}, so '
            f'that no block could be filled; lower it to {rollout.context_tokens} or less'
        )
    needed = -(-rollout.context_tokens // rollout.block_tokens) * rollout.block_tokens
    if 0 < rollout.cache_tokens < needed:
        yield (
            f'rollout.cache_tokens={rollout.cache_tokens} holds no sequence of rollout.context_tokens='
            f'{rollout.context_tokens} in blocks of rollout.block_tokens={rollout.block_tokens}; raise it to {needed} '
            'or more, or set 0'
        )


def find_task_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """The rules of task and model alone."""
    if c.task.name == 'jsonl' and not c.task.path:
        yield "task.name='jsonl' needs task.path: a file of JSON lines with question and answer (sft: or messages)"
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
    """No file of Hugging Face describes a plain decoder, so it stays in this process."""
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
    """Exports beside training, which a role of their own makes from checkpoints."""
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
