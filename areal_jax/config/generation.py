"""The section `rollout`: where answers come from and how they are generated. Fields, and rules that join them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import ClassVar, Literal

from areal_jax.config.agent_fields import PROGRAM
from areal_jax.config.cluster import parse_engines
from areal_jax.config.fields import (
    COUNT,
    COUNT_OR_OFF,
    LEASE,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE_ABOVE_ZERO,
    Config,
    ConfigSection,
    Purpose,
    choice,
    flag,
    integer,
    lengths,
    own_choice,
    plain_text,
    real,
    texts,
)
from areal_jax.config.kinds import IN_PROCESS, SERVERS, describe_addresses, find_channel, find_server
from areal_jax.config.training import generates

MOST_PREFILL_BUCKETS = 5  # an engine has 16 programs at most
_BY_ENGINES = (Purpose.EVALUATION, Purpose.SERVING)  # purposes that have engines too
_BY_ANSWERS = (Purpose.EVALUATION,)  # samples answers too; requests to a server bring these values


def uses_servers(c: Config) -> bool:
    """Tells whether answers come from other processes."""
    return not _is_in_process(c)


def cuts_softmax(c: Config) -> bool:
    """Tells whether answers are drawn from a part of the softmax only."""
    return c.rollout.top_k > 0 or c.rollout.top_p < 1


def _is_in_process(c: Config) -> bool:
    return find_server(c.rollout.server).in_process


def _has_own_engines(c: Config) -> bool:
    return find_server(c.rollout.server).has_own_engines


def _decodes(c: Config) -> bool:
    """Tells whether engines of this project compute tokens; a simulation draws their number."""
    return _has_own_engines(c) and not c.simulation.prices


def _has_episodes(c: Config) -> bool:
    """Tells whether answers may be episodes of agents; the user's own workflow decides that when it is called."""
    if c.simulation.prices:
        return bool(c.simulation.turns) or c.simulation.answers.strip().startswith('log(')
    return c.rollout.workflow != 'single_turn'


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutSection(ConfigSection):
    """The source of answers, and how they are generated."""

    section: ClassVar[str] = 'rollout'
    title: ClassVar[str] = 'Generation'
    used_if: ClassVar[Callable[[Config], bool]] = generates

    slots: int = integer(
        8,
        COUNT,
        'answers that one engine decodes at once',
        also_for=_BY_ENGINES,
        other_names='max_num_seqs max_concurrent_rollouts max_concurrency concurrency max_running_requests '
        'num_slots decode_batch_size',
    )
    decode_steps: int = integer(
        4,
        COUNT,
        'tokens per slot in one dispatch; an interruption waits for one dispatch',
        used_if=_has_own_engines,
        also_for=_BY_ENGINES,
    )
    context_tokens: int = integer(
        64,
        COUNT,
        'most tokens of a sequence, prompt and answer',
        also_for=_BY_ENGINES,
        other_names='max_model_len max_seq_len max_seq_length max_length max_len context_length seq_len',
    )
    block_tokens: int = integer(
        64,
        COUNT,
        'positions in a block of the KV cache; a group shares those of its prompt',
        used_if=_has_own_engines,
        also_for=_BY_ENGINES,
        other_names='block_size page_size',
    )
    cache_tokens: int = integer(
        0,
        COUNT_OR_OFF,
        'positions of the KV cache of an engine; 0 = slots * context_tokens',
        used_if=_has_own_engines,
        also_for=_BY_ENGINES,
        other_names='kv_cache_size gpu_memory_utilization mem_fraction_static cache_size',
    )
    state_snapshots: int | None = integer(
        None,
        COUNT_OR_OFF,
        'with recurrent layers: states kept for prompts that continue earlier ones; None = half as many as slots',
        used_if=_decodes,
        also_for=_BY_ENGINES,
        other_names='max_mamba_cache_size',
    )
    prefill_buckets: tuple[int, ...] = lengths(
        (64, 256),
        'tokens of a packed prefill, padding included; longer prompts go in pieces',
        used_if=_has_own_engines,
        also_for=_BY_ENGINES,
    )
    attention: str = choice(
        'auto',
        ('auto', 'gather', 'loops', 'native', 'pallas_gpu', 'pallas_tpu'),
        "over the KV cache; 'auto': by platform",
        used_if=_decodes,
        also_for=_BY_ENGINES,
    )
    weights: str = choice(
        'published',
        ('published', 'int8'),
        'int8: quantized, and activations, in engines alone',
        used_if=_decodes,
        also_for=_BY_ENGINES,
    )
    mla: str = choice(
        'absorbed',
        ('absorbed', 'expanded'),
        'latent attention: absorbed = caches hold latents; expanded = keys and values of each head, as in training',
        used_if=_has_own_engines,
        also_for=_BY_ENGINES,
    )
    record_routes: bool = flag(
        False, 'with experts: those that each token has reached, see docs/moe.md', also_for=_BY_ENGINES
    )
    slow_versions: int = integer(
        0,
        COUNT_OR_OFF,
        'engines of unequal speed: an answer of so many versions leaves a slow one for a faster one; 0 = none does',
        used_if=_is_in_process,
    )
    slow_engines: str = choice(
        'use',
        ('use', 'spare'),
        'engines of unequal hardware: spare = a slow class gets no requests while the others have room for all',
        used_if=_is_in_process,
    )
    kv_policy: Literal['recompute', 'keep', 'wait'] = choice(
        'recompute',
        ('recompute', 'keep', 'wait'),
        'KV cache of unfinished answers when new weights arrive; wait: no interruption',
        also_for=_BY_ENGINES,
    )
    server: str = own_choice(
        IN_PROCESS.name,
        tuple(SERVERS),
        'where answers come from: this process, or servers, see docs/serving.md',
        other_names='backend rollout_backend inference_backend rollout_engine use_vllm',
    )
    urls: tuple[str, ...] = texts(
        (),
        f'external: {describe_addresses()} of each server',
        used_if=lambda c: find_server(c.rollout.server).takes_urls,
        other_names='server_url server_urls endpoint endpoints vllm_server_base_url addresses',
    )
    max_retries: int = integer(
        3, COUNT_OR_OFF, 'servers: how often a request may fail before its group is dropped', used_if=uses_servers
    )
    pause_lease_s: float = real(
        90.0,
        LEASE,
        'own, jetstream: a server that a lost run has paused serves after so long',
        used_if=lambda c: find_server(c.rollout.server).leases_pauses and not c.simulation.prices,
    )
    max_mismatch: float | None = real(
        None,
        POSITIVE,
        'servers: most nats from the learner; None = 1e-3 in float32, 5e-2 else',
        used_if=lambda c: uses_servers(c) and not c.simulation.prices,
    )
    workflow: str = own_choice(
        'single_turn',
        ('single_turn', PROGRAM),
        'how a prompt becomes an answer: docs/your_task.md, docs/agents.md',
        also_for=_BY_ANSWERS,
        other_names='agent_loop multi_turn rollout_fn agent_func_path',
    )
    episode_deadline_s: float = real(
        0.0,
        NOT_NEGATIVE,
        'of an agent: then its episode has no reward; 0 = none',
        used_if=_has_episodes,
        also_for=_BY_ANSWERS,
    )
    group_size: int = integer(
        8,
        COUNT,
        'answers per prompt',
        other_names='n n_samples num_samples n_samples_per_prompt num_generations samples_per_prompt group '
        'num_return_sequences generations rollout_n n_rollouts num_rollouts answers_per_prompt '
        'responses_per_prompt',
    )
    max_running_groups: int = integer(
        0,
        COUNT_OR_OFF,
        'groups admitted and unfinished; 0: as many as fill the slots',
        other_names='max_running_prompts max_inflight_prompts max_head_offpolicyness_groups',
    )
    max_new_tokens: int = integer(
        16,
        COUNT,
        'tokens of an answer, its stop token included',
        also_for=_BY_ANSWERS,
        other_names='max_completion_length response_length max_response_length generate_max_len max_tokens '
        'max_gen_len max_generation_length max_answer_tokens max_response_len',
    )
    answer_lengths: str = plain_text(
        '',
        "for measurements with random weights: training answers end at drawn lengths, such as 'lognormal(1024, 0.75)'; "
        "'' = at rollout.max_new_tokens",
    )
    ignore_eos: bool = flag(
        False, 'EOS ends no answer, so that each has rollout.max_new_tokens tokens', also_for=_BY_ANSWERS
    )
    temperature: float = real(
        1.0,
        POSITIVE,
        'of sampling, and part of the policy in all log-probs',
        also_for=_BY_ANSWERS,
        other_names='temp sampling_temperature',
    )
    top_k: int = integer(
        0, COUNT_OR_OFF, '0 = off; training with a cut needs loss.truncated_sampling', also_for=_BY_ANSWERS
    )
    top_p: float = real(
        1.0,
        SHARE_ABOVE_ZERO,
        '1 = off; training with a cut needs loss.truncated_sampling',
        also_for=_BY_ANSWERS,
        other_names='nucleus',
    )

    def count_cache_blocks(self, slots: int, *, beside: bool = False) -> int:
        """Returns the KV-cache blocks of an engine: cache_tokens, or a full context for each of `slots` if that is 0.

        The slots for evaluation during training get no more blocks than they can fill.
        """
        most = slots * -(-self.context_tokens // self.block_tokens)
        if not self.cache_tokens:
            return most
        budget = self.cache_tokens // self.block_tokens
        return min(budget, most) if beside else budget


def find_server_problems(c: Config) -> Iterator[str]:
    """Yields a sentence for each setting that rollout.server excludes, mostly for servers in other processes."""
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
    if cuts_softmax(c) and not kind.gives_sampling_logprobs:
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


def find_length_problems(c: Config) -> Iterator[str]:
    """Yields a sentence if answers cannot end at drawn lengths.

    Raises ConfigError for a text that is no distribution.
    """
    rollout = c.rollout
    if not (text := rollout.answer_lengths):
        return
    # here, since no command has to import it for a text of ''
    from areal_jax.config.drawn_lengths import ANSWER_LENGTHS, Mixture, parse_distribution

    setting, drawn = f'{ANSWER_LENGTHS}={text!r}', parse_distribution(text, ANSWER_LENGTHS)
    if c.simulation.prices:
        yield (
            f'{setting} with simulation.prices={c.simulation.prices!r}: a simulation draws its answers from '
            f"simulation.answers; set that, and {ANSWER_LENGTHS}=''"
        )
    elif rollout.workflow != 'single_turn':
        yield (
            f'{setting} with rollout.workflow={rollout.workflow!r}: only answers of one turn have drawn lengths; use '
            f"rollout.workflow='single_turn', or {ANSWER_LENGTHS}=''"
        )
    parts = drawn.parts if isinstance(drawn, Mixture) else (drawn,)
    if min(part.quantile(0.0) for part in parts) > rollout.max_new_tokens:
        yield (
            f'{setting} with rollout.max_new_tokens={rollout.max_new_tokens} would end more than half of the answers '
            'at that limit; raise the limit and rollout.context_tokens, or draw shorter lengths'
        )


def find_sparing_problems(c: Config) -> Iterator[str]:
    """Yields a sentence for each setting that does not go with leaving out a slow class of engines at a publication."""
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


def find_quantization_problems(c: Config) -> Iterator[str]:
    """Yields a sentence for each setting that 8-bit engines exclude; the fix is always to use published weights."""
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


def find_route_problems(c: Config) -> Iterator[str]:
    """Yields a sentence if there are no routes of experts to replay or to record."""
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


def find_engine_problems(c: Config) -> Iterator[str]:
    """Yields a sentence if an engine cannot prefill, or hold a prompt and an answer, or one sequence in its cache."""
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
