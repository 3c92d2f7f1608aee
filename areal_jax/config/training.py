"""The sections of an update, `staleness`, `learner`, `optimizer`, `diagnostics`: fields, and rules that join them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import ClassVar

from areal_jax.config.cluster import ONE_DEVICE, parse_learner
from areal_jax.config.fields import (
    BYTES,
    COUNT,
    COUNT_OR_OFF,
    DECAY,
    DTYPES,
    LOSS_SCALE,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    SHARE_ABOVE_ZERO,
    VERSIONS,
    Config,
    ConfigSection,
    Value,
    choice,
    flag,
    integer,
    lengths,
    path_text,
    real,
)
from areal_jax.config.objectives import KL, find_kl, find_objective, is_policy, resolve


def generates(c: Config) -> bool:
    """Whether a run learns from answers of engines."""
    return find_objective(c.loss.objective).generates


@dataclasses.dataclass(frozen=True, kw_only=True)
class StalenessSection(ConfigSection):
    """The bounds on the age of the trained data."""

    section: ClassVar[str] = 'staleness'
    title: ClassVar[str] = 'How old the trained data may be'
    used_if: ClassVar[Callable[[Config], bool]] = generates

    eta: float = real(
        4.0,
        VERSIONS,
        'bound of Eq. 3 of arXiv 2505.24298, in versions; 0 = synchronous, inf = unbounded',
        other_names='max_staleness max_head_offpolicyness staleness_threshold staleness off_policyness max_lag lag '
        'max_off_policy_steps async_level',
    )
    schedule: str = path_text(
        'natural', "'natural', or for studies in lock-step 'fixed(k)', 'every(L)', 'uniform(0,k)', 'trace(file)'"
    )
    max_token_age: int | None = integer(
        None, COUNT_OR_OFF, 'exact bound on every trained token, in versions; None = off'
    )
    over_age: str = choice('off', ('off', 'drop', 'mask'), "beyond that bound: 'drop' the group or 'mask' the tokens")

    @property
    def oldest_kept(self) -> int | None:
        """The age in versions beyond which a token makes its group be dropped; None = no group is dropped."""
        return self.max_token_age if self.over_age == 'drop' else None

    @property
    def oldest_trained(self) -> int | None:
        """The age in versions beyond which a token leaves the loss but not its denominator; None = no token does."""
        return self.max_token_age if self.over_age == 'mask' else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerSection(ConfigSection):
    """The computation of an update."""

    section: ClassVar[str] = 'learner'
    title: ClassVar[str] = 'How an update is computed'

    groups_per_update: int = integer(
        8,
        COUNT,
        'B of Eq. 3; sft: demonstrations; dpo, reward_model: pairs',
        other_names='batch_size train_batch_size rollout_batch_size global_batch_size per_device_train_batch_size '
        'prompts_per_batch prompts_per_step batch bs consumer_batch_size num_prompts',
    )
    n_minibatches: int = integer(
        1,
        COUNT,
        'parts of a batch, each an optimizer step',
        other_names='ppo_n_minibatches num_minibatches n_mini_batches num_mini_batches ppo_mini_batch_size '
        'mini_batch_size minibatches',
    )
    epochs: int = integer(
        1,
        COUNT,
        'passes over the batch',
        other_names='ppo_epochs num_ppo_epochs max_epochs num_train_epochs update_epochs n_epochs',
    )
    packing: str = choice(
        'shared_prompt', ('shared_prompt', 'ordinary'), "'shared_prompt': a prompt once per row", used_if=generates
    )
    fill: str = choice('first_fit', ('first_fit', 'algorithm_1', 'padded'), 'algorithm_1: the paper; padded: one a row')
    row_tokens: int = integer(
        256,
        COUNT,
        'static length of a row; must hold one trajectory',
        other_names='max_tokens_per_mb ppo_max_token_len_per_gpu max_tokens_per_batch pack_length',
    )
    row_loss_tokens: int = integer(128, COUNT, 'static number of loss tokens of a row')
    rows_per_microbatch: int = integer(
        1,
        COUNT,
        'over all data shards',
        other_names='micro_batch_size ppo_micro_batch_size micro_train_batch_size ppo_micro_batch_size_per_gpu '
        'micro_batch_size_per_gpu gradient_accumulation_steps microbatch_size',
    )
    tail_buckets: int = integer(0, COUNT_OR_OFF, 'smaller rows for the last micro-batch: 1 = half, 2 = also a quarter')
    row_buckets: tuple[int, ...] = lengths(
        (), 'tokens of smaller rows, each compiled: rows are filled so that their sum is least'
    )
    accumulate: str = choice('dispatch', ('dispatch', 'scan'), "one program per micro-batch, 'scan': one per minibatch")
    filter_equal_rewards: bool = flag(
        True, 'do not train groups whose rewards are all equal; they still count as used', used_if=generates
    )
    dtype: str = choice(
        'float32',
        DTYPES,
        'of forward and backward passes; master weights stay float32',
        other_names='bf16 fp16 precision mixed_precision compute_dtype torch_dtype param_dtype',
    )
    loss_scale: float = real(1.0, LOSS_SCALE, 'float16: multiplies the loss; gradients are divided by it in float32')
    layers: str = choice(
        'list', ('list', 'stacked'), "'list' is best on CPU, 'stacked' (a scan) compiles fast at depth"
    )
    remat: str = choice(
        'dots',
        ('none', 'dots', 'attention', 'full'),
        'kept for the gradient: none = all, full = nothing',
        other_names='gradient_checkpointing activation_checkpointing enable_gradient_checkpointing',
    )
    attention: str = choice(
        'auto',
        ('auto', 'dense', 'blocked', 'pallas', 'splash', 'cudnn'),
        "'auto': by platform",
        other_names='attn_implementation flash_attn flash_attention attn',
    )
    expert_parallel: str = choice(
        'auto',
        ('auto', 'gather', 'all_to_all'),
        "how tokens reach experts of other devices; 'auto': the form that moves fewer bytes, on CPUs gather",
        other_names='expert_model_parallel moe_token_dispatcher_type token_dispatcher dispatcher',
    )
    routes: str = choice(
        'live',
        ('live', 'replay'),
        'with experts: replay = those that rollout.record_routes recorded',
        used_if=lambda c: generates(c) and c.rollout.record_routes,
        compared=False,
    )
    router_aux_loss: float = real(0.0, NOT_NEGATIVE, 'with experts: weight of a loss that evens their load')
    router_bias_rate: float = real(
        0.0,
        NOT_NEGATIVE,
        'sigmoid routers: change by step of the correction that evens the load; 0 = frozen',
        compared=False,
        other_names='moe_router_bias_update_rate bias_update_speed expert_bias_update_rate',
    )

    @property
    def row_room(self) -> tuple[int, int]:
        """The maximum number of tokens, and of loss tokens, in a row; ROW_ROOM names the fields."""
        return self.row_tokens, self.row_loss_tokens

    @property
    def evens_experts(self) -> bool:
        """Whether the loss has a term that evens the load of the experts."""
        return self.router_aux_loss > 0


ROW_ROOM = ('learner.row_tokens', 'learner.row_loss_tokens')


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiagnosticsSection(ConfigSection):
    """The measurements of a run in addition to its loss."""

    section: ClassVar[str] = 'diagnostics'
    title: ClassVar[str] = 'What a run measures beside its loss, see docs/diagnostics.md'

    ratio_sample: float = real(
        0.0,
        SHARE,
        'share of the trained answers whose importance ratio is split; 0 = off, at no cost',
        used_if=generates,
    )
    brakes: bool = flag(
        False, 'what each optimizer.brake reads, also where it is not used; keeps a copy of the gradient'
    )
    delta_rule: bool = flag(
        False,
        'with delta nets: the part of the mismatch that is due to their two forms, for one more pass token by token',
        used_if=generates,
    )
    latent_form: bool = flag(
        False,
        'with latent attention: the part of the mismatch that is due to its two forms, for two more passes',
        used_if=lambda c: generates(c) and c.rollout.mla == 'absorbed',
    )
    ring_bytes: int = integer(
        2**30,
        BYTES,
        'of the weights of earlier versions that this needs, in host memory',
        used_if=lambda c: generates(c) and c.diagnostics.ratio_sample > 0,
    )

    @property
    def splits_ratio(self) -> bool:
        """Whether the importance ratio is split, for which the weights of earlier versions are kept."""
        return self.ratio_sample > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSection(ConfigSection):
    """The optimizer, which turns gradients into weights."""

    section: ClassVar[str] = 'optimizer'
    title: ClassVar[str] = 'How gradients become weights'

    name: str = choice(
        'adamw',
        ('adamw', 'adamw8bit', 'adafactor', 'lion', 'sgd'),
        'see learning/optimizer.py',
        other_names='optim optimizer optimizer_type optimizer_name',
    )
    learning_rate: float = real(
        2e-5,
        NOT_NEGATIVE,
        'after warm-up',
        other_names='lr actor_lr policy_lr actor_learning_rate peak_lr max_lr base_lr step_size',
        compared=False,
    )
    schedule: str = choice(
        'constant',
        ('constant', 'cosine', 'linear'),
        'after warm-up, down to the last step',
        other_names='lr_scheduler lr_scheduler_type scheduler lr_schedule lr_decay warmup_style scheduler_type',
    )
    final_ratio: float = real(
        0.0,
        SHARE,
        'cosine, linear: last learning rate / learning_rate',
        used_if=lambda c: c.optimizer.schedule != 'constant',
        other_names='min_lr_ratio min_lr min_lr_rate lr_end',
    )
    moment_dtype: str = choice(
        'float32', ('float32', 'bfloat16'), 'adamw: of both moments', used_if=lambda c: c.optimizer.name == 'adamw'
    )
    b1: float = real(
        0.9,
        DECAY,
        'adamw, adamw8bit, lion: decay of the first moment',
        used_if=lambda c: c.optimizer.name in ('adamw', 'adamw8bit', 'lion'),
        other_names='beta1 adam_beta1 adam_b1',
    )
    b2: float = real(
        0.95,
        DECAY,
        'adamw, adamw8bit: decay of the second moment; lion: of the momentum',
        used_if=lambda c: c.optimizer.name in ('adamw', 'adamw8bit', 'lion'),
        other_names='beta2 adam_beta2 adam_b2',
    )
    eps: float = real(
        1e-8,
        POSITIVE,
        'adamw, adamw8bit: added to the root of the second moment',
        used_if=lambda c: c.optimizer.name in ('adamw', 'adamw8bit'),
        other_names='adam_eps adam_epsilon',
    )
    weight_decay: float = real(0.0, NOT_NEGATIVE, 'decoupled; 0 = off', other_names='wd l2')
    decay: str = choice(
        'all',
        ('all', 'matrices'),
        "leaves that decay; 'matrices': not norms, biases and the embedding",
        used_if=lambda c: c.optimizer.weight_decay > 0,
    )
    clip_norm: float = real(
        1.0,
        NOT_NEGATIVE,
        'global norm of the gradient; 0 = off',
        other_names='max_grad_norm grad_clip clip_grad gradient_clipping grad_norm max_norm clip_grad_norm',
    )
    warmup_steps: int = integer(
        0,
        COUNT_OR_OFF,
        'optimizer steps of linear warm-up',
        other_names='warmup lr_warmup_steps num_warmup_steps warmup_ratio lr_warmup_ratio warmup_steps_proportion',
    )
    brake: str = choice(
        'none', ('none', 'ess', 'lag', 'projection'), 'shortens steps on old data, see docs/staleness_methods.md'
    )
    brake_base: float = real(
        1.0,
        SHARE_ABOVE_ZERO,
        'ess: effective sample size of answers from which on steps are whole',
        used_if=lambda c: c.optimizer.brake == 'ess',
    )
    brake_lag: float = real(
        8.0,
        POSITIVE,
        'lag: age of the data in optimizer steps up to which steps are whole',
        used_if=lambda c: c.optimizer.brake == 'lag',
    )
    blocks: int = integer(1, COUNT, 'an update trains one of so many blocks of leaves, see docs/blockwise.md; 1 = all')
    block_order: str = choice(
        'cyclic',
        ('cyclic', 'shuffled'),
        'of the blocks of a round; shuffled: by run.seed',
        used_if=lambda c: c.optimizer.blocks > 1,
    )
    block_updates: int = integer(1, COUNT, 'updates before the next block', used_if=lambda c: c.optimizer.blocks > 1)
    block_state: str = choice(
        'host',
        ('host', 'drop'),
        'moments of blocks not being trained; drop: begin again at 0',
        used_if=lambda c: c.optimizer.blocks > 1,
    )


def find_room_problems(c: Config) -> Iterator[str]:
    """A sentence for a row that does not hold one trajectory."""
    rollout, learner = c.rollout, c.learner
    if learner.row_tokens < rollout.context_tokens:
        yield (
            f'learner.row_tokens={learner.row_tokens} must hold one trajectory of rollout.context_tokens='
            f'{rollout.context_tokens}; raise it'
        )
    if learner.row_loss_tokens < rollout.max_new_tokens:
        yield (
            f'learner.row_loss_tokens={learner.row_loss_tokens} must hold one answer of rollout.max_new_tokens='
            f'{rollout.max_new_tokens}; raise it'
        )


def find_row_problems(c: Config) -> Iterator[str]:
    """Yields a sentence for settings of rows that contradict each other."""
    learner = c.learner
    if generates(c) and (learner.packing, learner.fill) == ('shared_prompt', 'padded'):
        yield (
            "learner.fill='padded' puts one trajectory in a row, so learner.packing='shared_prompt' has no prompt to "
            "share: set learner.packing='ordinary'"
        )
    for name, off in (('tail_buckets', 0), ('row_buckets', ())):
        if (value := getattr(learner, name)) and learner.accumulate == 'scan':
            yield (
                f'learner.{name}={value} needs programs of one micro-batch: set '
                f"learner.accumulate='dispatch', or learner.{name}={off}"
            )
    if learner.row_buckets and learner.row_buckets[-1] >= learner.row_tokens:
        yield f'learner.row_buckets={learner.row_buckets} must lie below learner.row_tokens={learner.row_tokens}'


def find_device_problems(c: Config) -> Iterator[str]:
    """Yields a sentence for each size that the learner's devices cannot divide evenly, and for an idle tensor axis."""
    layout = parse_learner(c.cluster.learner)
    if c.learner.rows_per_microbatch % layout.data_shards:
        yield (
            f'learner.rows_per_microbatch={c.learner.rows_per_microbatch} must be a multiple of data * fsdp * expert '
            f'= {layout.data_shards} of cluster.learner={c.cluster.learner!r}'
        )
    if layout.tensor > 1 and 'tensor' not in c.cluster.strategy:
        yield (
            f'tensor={layout.tensor} of cluster.learner={c.cluster.learner!r} is left idle by cluster.strategy='
            f'{c.cluster.strategy!r}; use fsdp_tensor or tensor'
        )
    for path in ROW_ROOM:
        if (size := getattr(c.learner, path.partition('.')[2])) % layout.context:
            yield (
                f'{path}={size} must be a multiple of context={layout.context} of cluster.learner={c.cluster.learner!r}'
            )


def find_balance_problems(c: Config) -> Iterator[str]:
    """Yields a sentence for a loss that evens the load of experts in a model without experts."""
    if c.learner.router_aux_loss and c.model.source == 'random' and not c.model.experts:
        yield (
            f'learner.router_aux_loss={c.learner.router_aux_loss} needs a model with experts, and model.experts=0: '
            'name a family with experts (docs/moe.md), or set it to 0'
        )
    if c.learner.router_bias_rate and c.diagnostics.ratio_sample:
        yield (
            f'diagnostics.ratio_sample={c.diagnostics.ratio_sample} keeps the trained weights of earlier versions, '
            f'and learner.router_bias_rate={c.learner.router_bias_rate} changes others: set one of them to 0'
        )


def find_staleness_problems(c: Config) -> Iterator[str]:
    """Yields a sentence for settings of age that contradict each other or the objective."""
    lock_step = c.staleness.schedule != 'natural'
    if lock_step and c.staleness.eta != StalenessSection.eta:
        yield (
            f'staleness.schedule={c.staleness.schedule!r} fixes the age of every batch, so staleness.eta='
            f'{c.staleness.eta} would not be used; remove one of them'
        )
    if lock_step and c.staleness.over_age == 'drop':
        yield (
            f"staleness.schedule={c.staleness.schedule!r} fixes the age of every batch, so staleness.over_age='drop' "
            "would drop it whole, and its refill as well; use 'mask' or 'off'"
        )
    if (c.staleness.over_age == 'off') != (c.staleness.max_token_age is None):
        yield (
            f'staleness.max_token_age={c.staleness.max_token_age} and staleness.over_age={c.staleness.over_age!r} go '
            'together: set a bound and drop or mask, or neither'
        )
    if not lock_step and c.staleness.eta >= 1 and is_policy(c.loss.objective):
        yield from _version_problems(c)


def _version_problems(c: Config) -> Iterator[str]:
    """Yields a sentence for a regression on one value per group if its answers may come from different weights."""
    if (surrogate := resolve(c.loss)['surrogate']) == 'oapl':
        yield (
            f"loss.surrogate={surrogate!r} (loss.objective={c.loss.objective!r}) with staleness.schedule='natural' and "
            f'staleness.eta={c.staleness.eta}: its target belongs to one version of the policy, and a group may have '
            "two; use staleness.schedule='every(L)' or 'fixed(k)', or staleness.eta=0"
        )


def count_steps(c: Config) -> int:
    """The optimizer steps of a run."""
    return int(c.run.steps * c.learner.n_minibatches * c.learner.epochs)


def find_schedule_problems(c: Config) -> Iterator[str]:
    """Yields a sentence for a schedule that has no optimizer step after warm-up to decay over."""
    ours, steps = c.optimizer, count_steps(c)
    if ours.schedule != 'constant' and steps <= ours.warmup_steps:
        yield (
            f'optimizer.schedule={ours.schedule!r} falls over {steps} optimizer steps (run.steps * '
            f'learner.n_minibatches * learner.epochs), which must be more than optimizer.warmup_steps='
            f'{ours.warmup_steps}: raise run.steps or shorten the warm-up'
        )


def find_schedule_warnings(c: Config) -> Iterator[str]:
    """A sentence for a warm-up that the run does not finish."""
    if c.optimizer.warmup_steps > (steps := count_steps(c)):
        yield (
            f'optimizer.warmup_steps={c.optimizer.warmup_steps} is more than the {steps} optimizer steps of the run '
            '(run.steps * learner.n_minibatches * learner.epochs): the learning rate never reaches its value'
        )


def find_brake_problems(c: Config) -> Iterator[str]:
    """Yields a sentence for a brake on age or log-probs, as given answers have neither (objectives without engines)."""
    if c.optimizer.brake in ('ess', 'lag'):
        yield (
            f'optimizer.brake={c.optimizer.brake!r} with loss.objective={c.loss.objective!r}: given answers have no '
            "age and no log-probs of a policy; use optimizer.brake='none'"
        )


def find_block_problems(c: Config) -> Iterator[str]:
    """Yields a sentence for each setting that block-wise updates exclude; training all leaves always fixes it."""
    if c.optimizer.blocks == 1:
        return
    hosts = parse_learner(c.cluster.learner).hosts
    for path, value, fix, fits, why in (
        ('lora.rank', c.lora.rank, 0, not c.lora.rank, 'adapters are the leaves that are trained then, in all layers'),
        (
            *('learner.layers', c.learner.layers, 'list', c.learner.layers == 'list'),
            'a stacked leaf has the weights of all layers, and a block those of some',
        ),
        (
            *('learner.dtype', c.learner.dtype, 'float32', c.learner.dtype == 'float32'),
            'the leaves of other blocks are kept once, in float32',
        ),
        (
            *('loss.objective', c.loss.objective, 'decoupled_ppo', not _is_compared(c.loss.objective)),
            'a model beside the trained one is compared with all of its leaves',
        ),
        (
            *(KL, find_kl(c.loss), 0.0, not find_kl(c.loss)),
            'the reference model would need the frozen leaves as they were at the start',
        ),
        (
            *('diagnostics.ratio_sample', c.diagnostics.ratio_sample, 0.0, not c.diagnostics.ratio_sample),
            'its ring keeps the trained leaves alone of an earlier version',
        ),
        (
            *('optimizer.brake', c.optimizer.brake, 'none', c.optimizer.brake != 'projection'),
            'consecutive gradients are of different leaves',
        ),
        (
            *('diagnostics.brakes', c.diagnostics.brakes, False, not c.diagnostics.brakes),
            'consecutive gradients are of different leaves',
        ),
        (
            *('cluster.learner', c.cluster.learner, ONE_DEVICE, hosts is None),
            'processes of a learner write whole versions, each its share',
        ),
    ):
        if not fits:
            yield f'optimizer.blocks={c.optimizer.blocks} with {path}={value!r}: {why}; use {path}={fix!r}, or blocks=1'


def _is_compared(objective: str) -> bool:
    """Whether every update reads a second model, the reference or the teacher."""
    kind = find_objective(objective)
    return kind.reference or kind.teacher


def list_unmoved(c: Config) -> tuple[tuple[str, Value, bool, str], ...]:
    """Returns (field, value, whether it fits, why not) of state that a learner cannot take along to other devices."""
    blocks, sample = c.optimizer.blocks, c.diagnostics.ratio_sample
    return (
        ('optimizer.blocks', blocks, blocks == 1, 'moments of other blocks are not moved'),
        ('diagnostics.ratio_sample', sample, not sample, 'its ring of weights is not moved'),
    )


def client_seed(seed: int, clients: int, client: int) -> int:
    """Returns the seed of the noise of sampled answers; with several clients, each client has a different one."""
    return seed if clients == 1 else (seed * clients + client) % 2**31


def find_client_problems(c: Config) -> Iterator[str]:
    """Yields a sentence for each unmet requirement of independent clients that average their blocks."""
    ours = c.distributed
    if ours.clients == 1:
        return
    setting = f'distributed.clients={ours.clients}'
    if ours.client >= ours.clients:
        yield f'distributed.client={ours.client} must be below {setting}: the clients are numbered from 0'
    if not ours.average_directory:
        yield f'{setting} needs distributed.average_directory: a directory that all clients see'
    if c.optimizer.blocks == 1:
        yield f'{setting} with optimizer.blocks=1: clients average blocks; use optimizer.blocks=2 or more'
    if not find_objective(c.loss.objective).generates:
        objective = f'loss.objective={c.loss.objective!r}'
        yield f'{setting} with {objective}: its demonstrations are not divided; use distributed.clients=1'
    if parse_learner(c.cluster.learner).hosts is not None:
        yield (
            f'{setting} with cluster.learner={c.cluster.learner!r}: each client is one process; use '
            f'cluster.learner={ONE_DEVICE!r}'
        )
    if c.run.clock == 'real' and ours.average_deadline_s >= c.run.stall_timeout_s:
        yield (
            f'distributed.average_deadline_s={ours.average_deadline_s} must be below run.stall_timeout_s='
            f'{c.run.stall_timeout_s}: a client that waits for others completes nothing'
        )
    if c.run.steps % c.optimizer.block_updates:
        yield (
            f'run.steps={c.run.steps} must be a multiple of optimizer.block_updates={c.optimizer.block_updates} with '
            f'{setting}: a block is averaged when all its updates are made'
        )
