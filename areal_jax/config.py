"""The schema: every field declared and commented; `validate` refuses what cannot work, before any device is touched."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ml_collections import config_dict

from areal_jax.cluster import describe_former, parse_engines, parse_learner
from areal_jax.fields import require_declared
from areal_jax.ranges import RANGES, ConfigError, require_in_range

CONFIG = 'config.json'  # in the workdir: the resolved config of the run


def default_config() -> config_dict.ConfigDict:
    """Every field with its default; experiment files start from a copy and set what differs."""
    c = config_dict.ConfigDict()
    learning = _declare_learner, _declare_objective, _declare_devices
    for declare in (_declare_run, _declare_rollout, *learning, _declare_surroundings):
        declare(c)
    return c.lock()


def _declare_run(c: config_dict.ConfigDict) -> None:
    """What runs, which model, which task."""
    c.run = config_dict.ConfigDict()
    c.run.seed = 0  # of weights, prompts and sampling noise
    c.run.steps = 20  # updates to publish, >= 1
    c.run.clock = 'real'  # 'real' | 'virtual': deterministic asynchrony, bit for bit repeatable
    c.run.stall_timeout_s = 300.0  # real clock: end the run after so long without a completion, seconds
    c.run.compilation_budget = 0  # XLA programs compiled after warm-up that are tolerated before the report warns
    c.run.compilation_cache = ''  # directory of XLA's persistent cache; '' = off

    c.model = config_dict.ConfigDict()
    c.model.source = 'random'  # 'random' | 'gguf': a GGUF file | 'hf': a Hugging Face directory | 'run': another run
    c.model.path = ''  # gguf: the file, or 'package:NAME/FILE' inside an installed package; hf: directory; run: workdir
    c.model.family = 'llama'  # random: 'llama' | 'qwen2' (biases of query, key, value) | 'qwen3' (query and key norm)
    c.model.n_layers = 2  # random: the shape of the decoder
    c.model.d_model = 64  # width of the residual stream
    c.model.d_ff = 128  # width of the gated MLP
    c.model.n_heads = 4  # query heads
    c.model.n_kv_heads = 2  # key-value heads, divides n_heads
    c.model.head_dim = 16  # even
    c.model.rope_theta = 10000.0  # base of the rotary angles
    c.model.init_scale = 1.0  # random: multiplies the standard deviation of every matrix

    c.task = config_dict.ConfigDict()
    c.task.name = 'token_reversal'  # see tasks/registry.py
    c.task.system_prompt = ''  # '' = the chat template's own
    c.task.datasets = ()  # reasoning_gym: mix of basic_arithmetic, chain_sum, products
    c.task.path = ''  # jsonl: a file with a JSON object {question, answer} a line; sft: or {messages}
    c.task.held_out_fraction = 0.25  # share of the problems kept for evaluation
    c.task.over_length = 'refuse'  # problems that fit no slot (sft: no row): 'refuse' | 'drop', which counts them
    c.task.symbols = 2  # token_reversal: size of the alphabet
    c.task.length = 4  # token_reversal: symbols in a prompt
    c.task.verifier = 'process'  # 'process': in worker processes with a deadline | 'inline': trusted and fast only
    c.task.verifier_workers = 1  # worker processes
    c.task.verifier_deadline_s = 20.0  # wall seconds for one answer before its worker is killed
    c.task.verifier_attempts = 2  # tries for one answer before it is dropped
    c.task.verifier_memory_mb = 2048  # MiB of heap (RLIMIT_DATA) of each process of a scorer; 0 = no limit
    c.task.max_failed_groups = 32  # in a row without a verified answer before the run ends; evaluation: answers


def _declare_rollout(c: config_dict.ConfigDict) -> None:
    """Generation, and how stale its data may get."""
    c.rollout = config_dict.ConfigDict()
    c.rollout.slots = 8  # answers decoded at once by one engine
    c.rollout.decode_steps = 4  # tokens per slot in one dispatch: the pause of an interruption
    c.rollout.context_tokens = 64  # cache positions per slot: prompt + answer
    c.rollout.prefill_buckets = (32, 64)  # tokens; the largest must hold context_tokens - 1
    c.rollout.kv_policy = 'recompute'  # 'recompute' | 'keep' the KV cache of unfinished answers under new weights
    c.rollout.group_size = 8  # answers per prompt, >= 1
    c.rollout.max_running_groups = 16  # admitted and unfinished groups, bounds memory whatever eta is
    c.rollout.max_new_tokens = 16  # of an answer, its stop token included
    c.rollout.temperature = 1.0  # > 0; part of the policy in all four log-probs
    c.rollout.top_k = 0  # 0 = off; training with a cut needs loss.truncated_sampling
    c.rollout.top_p = 1.0  # 1 = off; the same

    c.staleness = config_dict.ConfigDict()
    c.staleness.eta = 4.0  # Eq. 3 of arXiv 2505.24298, in versions; 0 = synchronous, inf = unbounded
    c.staleness.schedule = 'natural'  # 'natural' | 'fixed(k)' | 'uniform(0,k)' | 'trace(file)': lock-step, for study
    c.staleness.max_token_age = config_dict.placeholder(int)  # exact bound on every trained token; None = off
    c.staleness.over_age = 'off'  # 'drop' the group | 'mask' the tokens | 'off'

    c.buffer = config_dict.ConfigDict()
    c.buffer.capacity = 64  # finished groups; a full buffer closes admission and never drops


def _declare_learner(c: config_dict.ConfigDict) -> None:
    """What an update is."""
    c.learner = config_dict.ConfigDict()
    c.learner.groups_per_update = 8  # B of Eq. 3; sft: demonstrations
    c.learner.n_minibatches = 1  # parts of a batch, each an optimizer step
    c.learner.epochs = 1  # passes over them
    c.learner.packing = 'shared_prompt'  # 'shared_prompt': a group's prompt once per row | 'ordinary'
    c.learner.fill = 'first_fit'  # 'first_fit' decreasing | 'algorithm_1' of the paper | 'padded': one answer a row
    c.learner.row_tokens = 256  # static length of a row; must hold one trajectory
    c.learner.row_loss_tokens = 128  # static number of loss tokens of a row
    c.learner.rows_per_microbatch = 1  # over all data shards
    c.learner.tail_buckets = 0  # smaller rows for a light last micro-batch: 1 = half, 2 = also a quarter, ...
    c.learner.accumulate = 'dispatch'  # 'scan': one program per minibatch | 'dispatch': one per micro-batch
    c.learner.filter_equal_rewards = True  # leave groups without signal out of packing; their place stays used
    c.learner.dtype = 'float32'  # of the passes: 'float32' | 'bfloat16' | 'float16'; masters stay float32
    c.learner.loss_scale = 1.0  # float16: multiplies the loss before its gradient, divided out in float32
    c.learner.layers = 'list'  # 'list': a straight program, best on CPU | 'stacked': a loop, compiles fast at depth
    c.learner.remat = 'dots'  # kept for the gradient: 'none' everything | 'dots' | 'attention' | 'full' nothing
    c.learner.attention = 'auto'  # 'auto' by platform | 'dense' | 'blocked' | 'pallas' | 'splash' | 'cudnn'

    c.lora = config_dict.ConfigDict()
    c.lora.rank = 0  # of the adapters; 0 = train all weights
    c.lora.alpha = 16.0  # adapters count alpha / rank
    c.lora.targets = ('query', 'key', 'value', 'output', 'gate', 'up', 'down')  # projections that get them


def _declare_objective(c: config_dict.ConfigDict) -> None:
    """What an update follows, and how far."""
    c.loss = config_dict.ConfigDict()
    c.loss.objective = 'decoupled_ppo'  # 'decoupled_ppo': asynchronous RL | 'sft': imitate given answers, docs/sft.md
    c.loss.clip_epsilon = 0.2  # lower half width of the trust region around the proximal policy
    c.loss.clip_epsilon_high = config_dict.placeholder(float)  # upper half width; None = clip_epsilon
    c.loss.proximal = 'recompute'  # 'recompute' | 'loglinear' (A-3PO) | 'behavior' (plain PPO)
    c.loss.behavior_weight_cap = config_dict.placeholder(float)  # caps pi_prox/pi_behav; None = the paper's, uncapped
    c.loss.advantage = 'group'  # 'group': (r-mean)/(std+1e-4) in the group | 'group_mean': r-mean | 'rloo'
    c.loss.aggregation = 'token_mean'  # 'token_mean' | 'sequence_mean'
    c.loss.denominator = 'kept'  # 'kept' | 'all' groups: 'kept' gives more weight the more filter_equal_rewards removes
    c.loss.truncated_sampling = 'refuse'  # top_k, top_p: 'refuse' | 'full_softmax': biased by the mass kept, a metric
    c.loss.entropy_coefficient = 0.0  # > 0 rewards entropy
    c.loss.kl_coefficient = 0.0  # > 0 keeps the policy near the reference, the weights at the start
    c.loss.kl_estimator = 'k3'  # 'k1' | 'k2' | 'k3' of that divergence

    c.optimizer = config_dict.ConfigDict()
    c.optimizer.name = 'adamw'  # 'adamw' | 'adamw8bit' | 'adafactor' | 'lion' | 'sgd'
    c.optimizer.learning_rate = 2e-5  # after warm-up
    c.optimizer.schedule = 'constant'  # 'constant' | 'cosine' | 'linear', down to the last step of the run
    c.optimizer.final_ratio = 0.0  # cosine, linear: last learning rate / learning_rate
    c.optimizer.moment_dtype = 'float32'  # adamw: 'float32' | 'bfloat16', of both moments
    c.optimizer.b1 = 0.9  # adamw: decay of the first moment
    c.optimizer.b2 = 0.95  # adamw: decay of the second moment
    c.optimizer.eps = 1e-8  # adamw: added to the root of the second moment
    c.optimizer.weight_decay = 0.0  # decoupled; 0 = off
    c.optimizer.decay = 'all'  # 'all' leaves | 'matrices': not norms, biases and the embedding
    c.optimizer.clip_norm = 1.0  # global gradient norm; 0 = off
    c.optimizer.warmup_steps = 0  # linear warm-up, optimizer steps


def _declare_devices(c: config_dict.ConfigDict) -> None:
    """Which devices train and which generate; cluster.py has the parsers."""
    c.cluster = config_dict.ConfigDict()
    c.cluster.learner = 'data=1'  # sizes of its mesh over the axes data, fsdp, context, tensor: 'data=2,fsdp=2'
    c.cluster.engines = '1 x shared'  # 'N x shared' with the learner's first device | 'N x tensor=1': one device each
    c.cluster.strategy = 'fsdp'  # 'fsdp' | 'fsdp_tensor' | 'tensor' | 'replicated': see sharding/rules.py

    c.distributed = config_dict.ConfigDict()  # the learner's mesh over several processes
    c.distributed.processes = 1  # each started with the same config; process 0 drives
    c.distributed.coordinator = ''  # host:port of process 0, with --process_id; '' = SLURM, GKE or the pod tells
    c.distributed.command_deadline_s = 600.0  # longest command of the learner before the run ends, compilation included


def _declare_surroundings(c: config_dict.ConfigDict) -> None:
    """Weights on their way, and what a run leaves behind."""
    c.publication = config_dict.ConfigDict()
    c.publication.channel = 'device'  # 'device': in this process | 'files': safetensors directories
    c.publication.directory = ''  # files: where versions are written; '' = WORKDIR/publication
    c.publication.dtype = 'float32'  # of what engines decode with: 'float32' | 'bfloat16' | 'float16'
    c.publication.verify = False  # engines recompute the digest of every received leaf

    c.checkpoint = config_dict.ConfigDict()
    c.checkpoint.every = 0  # updates between saves; 0 = only when the run ends or is stopped
    c.checkpoint.keep = 2  # newest ones kept, 1 where the disk is nearly full; fixed(k) puts k more weights into each

    c.sft = config_dict.ConfigDict()  # read where loss.objective='sft'
    c.sft.evaluate_every = 0  # updates between held-out likelihoods; 0 = only before the first and after the last
    c.sft.export_dtype = 'float32'  # of WORKDIR/export: 'float32' | 'bfloat16' | 'float16'

    c.evaluation = config_dict.ConfigDict()
    c.evaluation.problems = 64  # held-out problems (sft: demonstrations); 0 = no evaluation
    c.evaluation.samples = 4  # sampled answers per problem at rollout.temperature, beside one greedy

    c.telemetry = config_dict.ConfigDict()
    c.telemetry.progress = True  # a line per update on the terminal
    c.telemetry.tensorboard = True  # event files in WORKDIR/tensorboard
    c.telemetry.plots = True  # PNG plots when the run ends

    c.virtual = config_dict.ConfigDict()  # prices of work under the virtual clock, seconds
    c.virtual.decode_step_s = 0.01  # one step of all slots
    c.virtual.prefill_token_s = 0.0002  # one token of a padded row
    c.virtual.train_token_s = 0.0005  # one packed token, forward and backward
    c.virtual.publish_s = 0.02  # one transfer, receive or snapshot
    c.virtual.reward_s = 0.001  # one answer
    c.virtual.save_s = 0.05  # one checkpoint


def flatten(config: Mapping[str, Any], prefix: str = '') -> Iterator[tuple[str, Any]]:
    """('rollout.slots', 8), ... for every leaf."""
    for key, value in config.items():
        path = f'{prefix}{key}'
        if isinstance(value, (config_dict.ConfigDict, dict)):
            yield from flatten(value, f'{path}.')
        else:
            yield path, value


def validate(config: config_dict.ConfigDict) -> None:
    """Raises ConfigError for what cannot run, naming the fields, their values and the fix."""
    resolved = config.copy_and_resolve_references()
    if former := describe_former(dict(flatten(resolved))):
        raise ConfigError(former)
    require_declared(resolved, default_config())
    require_in_range({path: value for path, value in flatten(resolved) if path in RANGES})
    for problem in _problems(resolved):
        raise ConfigError(problem)


DTYPES = ('float32', 'bfloat16', 'float16')
CHOICES = {
    'run.clock': ('real', 'virtual'),
    'model.source': ('random', 'gguf', 'hf', 'run'),
    'model.family': ('llama', 'qwen2', 'qwen3'),
    'task.over_length': ('refuse', 'drop'),
    'task.verifier': ('process', 'inline'),
    'rollout.kv_policy': ('recompute', 'keep'),
    'staleness.over_age': ('off', 'drop', 'mask'),
    'learner.packing': ('shared_prompt', 'ordinary'),
    'learner.fill': ('first_fit', 'algorithm_1', 'padded'),
    'learner.accumulate': ('dispatch', 'scan'),
    'learner.dtype': DTYPES,
    'learner.layers': ('list', 'stacked'),
    'learner.remat': ('none', 'dots', 'attention', 'full'),
    'learner.attention': ('auto', 'dense', 'blocked', 'pallas', 'splash', 'cudnn'),
    'loss.objective': ('decoupled_ppo', 'sft'),
    'loss.proximal': ('recompute', 'loglinear', 'behavior'),
    'loss.advantage': ('group', 'group_mean', 'rloo'),
    'loss.aggregation': ('token_mean', 'sequence_mean'),
    'loss.denominator': ('kept', 'all'),
    'loss.truncated_sampling': ('refuse', 'full_softmax'),
    'loss.kl_estimator': ('k1', 'k2', 'k3'),
    'optimizer.name': ('adamw', 'adamw8bit', 'adafactor', 'lion', 'sgd'),
    'optimizer.decay': ('all', 'matrices'),
    'optimizer.schedule': ('constant', 'cosine', 'linear'),
    'optimizer.moment_dtype': ('float32', 'bfloat16'),
    'cluster.strategy': ('fsdp', 'fsdp_tensor', 'tensor', 'replicated'),
    'publication.dtype': DTYPES,
    'publication.channel': ('device', 'files'),
    'sft.export_dtype': DTYPES,
}


def _problems(c: config_dict.ConfigDict) -> Iterator[str]:
    values = dict(flatten(c))
    for path, choices in CHOICES.items():
        if values[path] not in choices:
            yield f'{path}={values[path]!r} is not known; use one of {", ".join(choices)}'
    yield from _sft_problems(c) if c.loss.objective == 'sft' else _rollout_problems(c)
    yield from _training_problems(c)


def _sft_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """What supervised training cannot run with."""
    if c.sft.evaluate_every and not c.evaluation.problems:
        yield (
            f'sft.evaluate_every={c.sft.evaluate_every} measures nothing with evaluation.problems=0; set '
            'evaluation.problems, or sft.evaluate_every=0'
        )


def _rollout_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Pairs of fields of the asynchronous loop, each legal alone, that cannot go together."""
    parse_engines(c.cluster.engines)
    lock_step = c.staleness.schedule != 'natural'
    if lock_step and c.staleness.eta != default_config().staleness.eta:
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
    if c.rollout.group_size < 2:
        yield (
            f'rollout.group_size={c.rollout.group_size} with loss.advantage={c.loss.advantage!r} gives every answer '
            'the advantage 0; use rollout.group_size >= 2'
        )
    if (c.rollout.top_k > 0 or c.rollout.top_p < 1) and c.loss.truncated_sampling == 'refuse':
        yield (
            f'rollout.top_k={c.rollout.top_k} and rollout.top_p={c.rollout.top_p} draw from a part of the softmax, but '
            "the learner's log-probs are those of all of it: set rollout.top_k=0 and rollout.top_p=1, or accept a bias "
            "by the mass kept with loss.truncated_sampling='full_softmax' (it is 'refuse')"
        )
    if c.buffer.capacity < c.learner.groups_per_update:
        yield (
            f'buffer.capacity={c.buffer.capacity} can never hold learner.groups_per_update='
            f'{c.learner.groups_per_update} groups; raise the capacity'
        )
    if c.rollout.max_new_tokens >= c.rollout.context_tokens:
        yield (
            f'rollout.max_new_tokens={c.rollout.max_new_tokens} leaves no room for a prompt in rollout.context_tokens='
            f'{c.rollout.context_tokens}; raise the context'
        )
    buckets = list(c.rollout.prefill_buckets)
    if buckets != sorted({size for size in buckets if size > 0}):
        yield f'rollout.prefill_buckets={tuple(buckets)} must be positive lengths in ascending order'
    if max(buckets, default=0) < c.rollout.context_tokens - 1:
        yield (
            f'rollout.prefill_buckets={tuple(c.rollout.prefill_buckets)} must hold an unfinished answer: raise the '
            f'largest to rollout.context_tokens - 1 = {c.rollout.context_tokens - 1}'
        )
    if c.learner.row_tokens < c.rollout.context_tokens:
        yield (
            f'learner.row_tokens={c.learner.row_tokens} must hold one trajectory of rollout.context_tokens='
            f'{c.rollout.context_tokens}; raise it'
        )
    if c.learner.row_loss_tokens < c.rollout.max_new_tokens:
        yield (
            f'learner.row_loss_tokens={c.learner.row_loss_tokens} must hold one answer of rollout.max_new_tokens='
            f'{c.rollout.max_new_tokens}; raise it'
        )


def _training_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """The same of task, model, learner and mesh."""
    if c.task.name == 'jsonl' and not c.task.path:
        yield "task.name='jsonl' needs task.path: a file of JSON lines with question and answer (sft: or messages)"
    layout = parse_learner(c.cluster.learner)
    if c.learner.rows_per_microbatch % layout.data_shards:
        yield (
            f'learner.rows_per_microbatch={c.learner.rows_per_microbatch} must be a multiple of data * fsdp = '
            f'{layout.data_shards} of cluster.learner={c.cluster.learner!r}'
        )
    if c.model.source == 'gguf' and not c.model.path:
        yield "model.source='gguf' needs model.path: a file, or package:NAME/FILE inside an installed package"
    if c.model.source == 'hf' and not c.model.path:
        yield "model.source='hf' needs model.path: a directory with config.json and safetensors"
    if c.model.source == 'run' and not c.model.path:
        yield "model.source='run' needs model.path: the --workdir of another run"
    if c.model.source == 'random' and c.model.n_heads % c.model.n_kv_heads:
        yield f'model.n_heads={c.model.n_heads} must be a multiple of model.n_kv_heads={c.model.n_kv_heads}'
    if c.model.source == 'random' and c.model.head_dim % 2:
        yield f'model.head_dim={c.model.head_dim} must be even: rotary positions need pairs'
    if layout.tensor > 1 and 'tensor' not in c.cluster.strategy:
        yield (
            f'tensor={layout.tensor} of cluster.learner={c.cluster.learner!r} is left idle by cluster.strategy='
            f'{c.cluster.strategy!r}; use fsdp_tensor or tensor'
        )
    for field, size in (('row_tokens', c.learner.row_tokens), ('row_loss_tokens', c.learner.row_loss_tokens)):
        if size % layout.context:
            yield (
                f'learner.{field}={size} must be a multiple of context={layout.context} of cluster.learner='
                f'{c.cluster.learner!r}'
            )


class TrackedConfig:
    """A read-only view of a resolved config that remembers which fields were read.

    Args:
      overrides: the fields that the command line sets, 'rollout.slots'; each must be read by the run as built.
    """

    def __init__(self, config: config_dict.ConfigDict, overrides: Collection[str] = ()):
        self._config = config.copy_and_resolve_references()
        self._overrides = frozenset(overrides)
        self._read: set[str] = set()

    def __getattr__(self, section: str) -> _TrackedSection:
        return _TrackedSection(self._config[section], section, self._read)

    def as_dict(self) -> dict[str, Any]:
        """Plain nested dict, without marking anything as read."""
        return json.loads(self._config.to_json_best_effort())

    def unread(self) -> list[tuple[str, Any]]:
        """Fields whose value differs from the default and that nothing has read."""
        defaults = dict(flatten(default_config()))
        return [
            (path, value)
            for path, value in flatten(self._config)
            if value != defaults.get(path) and path not in self._read
        ]

    def idle_fields(self) -> list[str]:
        """'evaluation.samples=16', ... for the report: set in the config file, and not used by the run as built."""
        return [f'{path}={value!r}' for path, value in self.unread()]

    def require_all_read(self) -> None:
        """Raises ConfigError when the command line sets a field that the run as built does not use.

        What a config file sets may be made idle by a switch on the command line, so that is only reported.
        """
        if unread := [(path, value) for path, value in self.unread() if path in self._overrides]:
            fields = ', '.join(f'{path}={value!r}' for path, value in unread)
            raise ConfigError(
                f'set but never read: {fields}. This run does not use '
                f'{"it" if len(unread) == 1 else "them"}: remove the setting or the one that makes it unused.'
            )


class _TrackedSection:
    def __init__(self, section: config_dict.ConfigDict, name: str, read: set[str]):
        self._section, self._name, self._read = section, name, read

    def __getattr__(self, field: str) -> Any:
        value = self._section[field]
        self._read.add(f'{self._name}.{field}')
        return value
