"""From a config to the parts of a run. Each function reads the fields that its part uses, and only those."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from areal_jax.app.earlier_run import EarlierRun, read_run_config
from areal_jax.cluster import parse_engines, parse_learner
from areal_jax.config import TrackedConfig
from areal_jax.control.clocks.loop import LoopClock
from areal_jax.control.clocks.real import RealClock
from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.controller import LoopSettings
from areal_jax.control.events import EventLog
from areal_jax.control.gate import StalenessGate
from areal_jax.control.schedule import Schedule, VersionRing, parse_schedule
from areal_jax.formats.gguf import find_package_file, load_gguf, read_gguf_shape
from areal_jax.formats.hf_config import read_hf_config
from areal_jax.formats.hf_directory import load_hf_weights
from areal_jax.learning.commands import CommandLeader
from areal_jax.learning.learner import SpmdLearner
from areal_jax.learning.optimizer import Optimizer, make_optimizer
from areal_jax.learning.settings import LearnerSettings
from areal_jax.models.decoder import Decoder
from areal_jax.models.lora import Lora
from areal_jax.models.shape import ModelConfig
from areal_jax.publication.device import DeviceChannel
from areal_jax.publication.files import FilesChannel
from areal_jax.ranges import ConfigError
from areal_jax.rollout.decode.backend import JaxDecodeBackend
from areal_jax.sharding.allocation import Allocation, allocate
from areal_jax.sharding.mesh import make_mesh
from areal_jax.sharding.rules import param_shardings
from areal_jax.tasks.registry import make_task, value_names
from areal_jax.tasks.task import Task
from areal_jax.tasks.token_reversal import characters
from areal_jax.tasks.tokenizer import CharacterTokenizer, GgufTokenizer, HfTokenizer, Tokenizer
from areal_jax.tasks.verifier import InlineVerifier, ProcessVerifier
from areal_jax.types import SamplingParams


@dataclasses.dataclass
class Model:
    """A decoder with its initial weights and its tokenizer."""

    decoder: Decoder
    params: Any
    tokenizer: Tokenizer
    source: pathlib.Path | None = None  # file or directory of the weights; None = drawn
    companions: pathlib.Path | None = None  # Hugging Face directory with the files of the tokenizer


def use_compilation_cache(config: TrackedConfig) -> None:
    """Tells jax where compiled programs are kept; raises ConfigError for a directory that cannot be written."""
    if not (cache := config.run.compilation_cache):
        return
    directory = pathlib.Path(cache).absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f'run.compilation_cache={cache!r} is no directory ({error.strerror}); use another') from error
    jax.config.update('jax_compilation_cache_dir', str(directory))


def read_shape(config: TrackedConfig) -> ModelConfig:
    """The shape of the model, without its weights."""
    config = _find_origin(config)
    if config.model.source == 'gguf':
        return read_gguf_shape(_gguf_file(config))
    if config.model.source == 'hf':
        return read_hf_config(pathlib.Path(config.model.path))
    return _random_shape(config, CharacterTokenizer(characters(config.task.symbols)).vocab_size)


def _gguf_file(config: TrackedConfig) -> pathlib.Path:
    path = config.model.path
    return find_package_file(path) if path.startswith('package:') else pathlib.Path(path)


def describe_loading(config: TrackedConfig) -> str:
    """'loading model.gguf': what `build_model` does."""
    if config.model.source == 'random':
        return 'drawing weights'
    return f'loading {pathlib.PurePath(config.model.path.removeprefix("package:")).name}'


def build_model(config: TrackedConfig) -> Model:
    """Weights and tokenizer as model.source says; raises TokenizerError when the two do not fit."""
    if config.model.source == 'gguf':
        file = _gguf_file(config)
        model_config, params, fields = load_gguf(file)
        model = Model(Decoder(model_config), params, GgufTokenizer(fields, str(file)), file)
    elif config.model.source == 'hf':
        model = _load_hf_model(config, pathlib.Path(config.model.path))
    elif config.model.source == 'run':
        model = _load_run_model(config)
    else:
        decoder, tokenizer = _random_decoder(config)
        model = Model(decoder, decoder.init(config.run.seed, config.model.init_scale), tokenizer)
    model.tokenizer.fits(model.decoder.config.vocab_size)
    return model


def _load_hf_model(config: TrackedConfig, directory: pathlib.Path) -> Model:
    """Weights go from the files straight to where the learner has them."""
    decoder = Decoder(read_hf_config(directory))
    shardings = _cut_params(config, decoder.config)(decoder.abstract())
    params = load_hf_weights(directory, decoder.config, shardings=shardings)
    return Model(decoder, params, HfTokenizer(directory), directory, companions=directory)


def _load_run_model(config: TrackedConfig) -> Model:
    """The weights of another run's newest checkpoint, with the tokenizer that it was trained with."""
    run = EarlierRun(config.model.path)
    model = _describe_model(run.config)
    run.require_shape(config, model.decoder.config)
    model.params = run.read_weights(model.decoder, _cut_params(config, model.decoder.config))
    model.source = run.checkpoint
    return model


def _find_origin(config: TrackedConfig) -> TrackedConfig:
    """The config that says where shape and tokenizer come from: of the run at the end of a chain of earlier runs."""
    runs: list[str] = []
    while config.model.source == 'run':
        path = config.model.path
        if path in runs:
            raise ConfigError(f'{runs[-1]} started from {path}, which started from it: their config.json were changed')
        runs.append(path)
        config = read_run_config(pathlib.Path(path))
    return config


def _describe_model(config: TrackedConfig) -> Model:
    """Decoder and tokenizer of an earlier run's config, without weights."""
    config = _find_origin(config)
    if config.model.source == 'gguf':
        shape, _, fields = load_gguf(_gguf_file(config))
        return Model(Decoder(shape), None, GgufTokenizer(fields))
    if config.model.source == 'hf':
        directory = pathlib.Path(config.model.path)
        return Model(Decoder(read_hf_config(directory)), None, HfTokenizer(directory), companions=directory)
    decoder, tokenizer = _random_decoder(config)
    return Model(decoder, None, tokenizer)


def _cut_params(config: TrackedConfig, shape: ModelConfig) -> Callable[[Any], Any]:
    """Where the learner has the leaves of a tree in list form."""
    units = {'heads': shape.n_heads, 'kv_heads': shape.n_kv_heads}
    return lambda tree: param_shardings(tree, build_mesh(config), config.cluster.strategy, units)


def _random_decoder(config: TrackedConfig) -> tuple[Decoder, Tokenizer]:
    tokenizer = CharacterTokenizer(characters(config.task.symbols))
    return Decoder(_random_shape(config, tokenizer.vocab_size)), tokenizer


def _random_shape(config: TrackedConfig, vocab_size: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=config.model.d_model,
        n_layers=config.model.n_layers,
        n_heads=config.model.n_heads,
        n_kv_heads=config.model.n_kv_heads,
        head_dim=config.model.head_dim,
        d_ff=config.model.d_ff,
        rope_theta=config.model.rope_theta,
        context_tokens=_longest(config),
        family=config.model.family,
        qkv_bias=config.model.family == 'qwen2',
        qk_norm=config.model.family == 'qwen3',
    )


def _longest(config: TrackedConfig) -> int:
    """Tokens of a sequence, at most."""
    return config.learner.row_tokens if config.loss.objective == 'sft' else config.rollout.context_tokens


def build_task(config: TrackedConfig, tokenizer: Tokenizer) -> Task:
    """The task, without problems whose prompts do not fit the engines' context, or an error that names the first."""
    name = config.task.name
    task = make_task(name, tokenizer, **{field: getattr(config.task, field) for field in value_names(name)})
    room = config.rollout.context_tokens - config.rollout.max_new_tokens
    task = task.fitting(room, config.task.over_length)
    sizes = task.sizes()
    if sizes['dropped']:
        print(
            f'dropped {sizes["dropped"]} of {sum(sizes.values())} problems: their prompts have more than {room} tokens',
            flush=True,
        )
    if 0 < sizes['held_out'] < (wanted := config.evaluation.problems):
        print(f'evaluation.problems={wanted}: all {sizes["held_out"]} held-out problems are evaluated', flush=True)
    return task


def build_log_and_clock(
    config: TrackedConfig, path: pathlib.Path, next_seq: int, start_s: float
) -> tuple[EventLog, LoopClock]:
    log = EventLog(path, next_seq)
    engines = {engine_name(index): 1 for index in range(parse_engines(config.cluster.engines).count)}
    lanes = engines | {'learner': 1, 'reward': config.task.verifier_workers, 'publish': 1, 'disk': 1}
    if config.run.clock == 'real':
        return log, RealClock(lanes, log, config.run.stall_timeout_s, start_s)
    prices = config.virtual
    per_unit = {
        'decode': prices.decode_step_s,
        'prefill': prices.prefill_token_s,
        'train': prices.train_token_s,
        **dict.fromkeys(('publish', 'load', 'snapshot'), prices.publish_s),
        'reward': prices.reward_s,
        'save': prices.save_s,
    }
    return log, VirtualClock(lanes, log, per_unit, start_s)


def engine_name(index: int) -> str:
    return f'engine/{index}'


def build_verifier(
    config: TrackedConfig, clock: LoopClock, task: Task, decode: Callable[[np.ndarray], str]
) -> ProcessVerifier | InlineVerifier:
    if config.task.verifier == 'inline':
        return InlineVerifier(task.score, decode)
    return ProcessVerifier(
        clock,
        task.scorer,
        decode,
        workers=config.task.verifier_workers,
        deadline_s=config.task.verifier_deadline_s,
        attempts=config.task.verifier_attempts,
        memory_mb=config.task.verifier_memory_mb,
    )


def build_learner(config: TrackedConfig, model: Model) -> SpmdLearner:
    """The learner; `model.params` is copied and may be dropped."""
    mesh = build_mesh(config)
    decoder, params = build_training_decoder(config, model)
    optimizer = build_optimizer(config)
    settings = build_learner_settings(config)
    return SpmdLearner(
        decoder,
        params,
        mesh,
        optimizer=optimizer,
        learning_rate=config.optimizer.learning_rate,
        settings=settings,
    )


def require_finite_weights(config: TrackedConfig, learner: SpmdLearner | CommandLeader, model: Model) -> None:
    """Raises NonFiniteError, naming where the weights come from, where some are NaN or infinite.

    A command of the learner: call it when the learner of the whole run is there (processes.lead).
    """
    if model.source is None:
        what, fix = f'weights drawn with model.init_scale={config.model.init_scale:g}', 'lower it'
    else:
        what, fix = f'model.path={str(model.source)!r}', 'get the files again or name another model'
    learner.require_finite(what, fix)


def build_mesh(config: TrackedConfig) -> Mesh:
    """The learner's mesh; `build_allocation` has the same one."""
    layout = parse_learner(config.cluster.learner)
    return make_mesh(layout.data, layout.fsdp, context=layout.context, tensor=layout.tensor)


def build_allocation(config: TrackedConfig) -> Allocation:
    """The devices of the learner and of every engine."""
    return allocate(parse_learner(config.cluster.learner), parse_engines(config.cluster.engines))


def build_training_decoder(config: TrackedConfig, model: Model) -> tuple[Decoder, Any]:
    """The decoder in the form in which it is trained, and its weights: those of the model and, with lora, adapters."""
    if config.lora.rank > model.decoder.config.d_model:
        raise ConfigError(
            f'lora.rank={config.lora.rank} is above the width of the model, {model.decoder.config.d_model}: adapters '
            'would be larger than what they adapt; lower it, or set lora.rank=0 to train all weights'
        )
    form = {'layers': config.learner.layers, 'remat': config.learner.remat}
    decoder = Decoder(model.decoder.config, **form, lora=build_lora(config))
    return decoder, decoder.complete(model.params, config.run.seed)


def build_lora(config: TrackedConfig) -> Lora | None:
    lora = config.lora
    return Lora(lora.rank, lora.alpha, tuple(lora.targets)) if lora.rank else None


def build_optimizer(config: TrackedConfig) -> Optimizer:
    optimizer, learner = config.optimizer, config.learner
    own: dict[str, Any] = {}
    if optimizer.name in ('adamw', 'adamw8bit'):
        own = {'b1': optimizer.b1, 'b2': optimizer.b2, 'eps': optimizer.eps}
    if optimizer.name == 'lion':
        own = {'b1': optimizer.b1, 'b2': optimizer.b2}
    if optimizer.name == 'adamw':
        own['moment_dtype'] = optimizer.moment_dtype
    if optimizer.schedule != 'constant':
        steps = config.run.steps * learner.n_minibatches * learner.epochs
        own |= {'total_steps': steps, 'final_ratio': optimizer.final_ratio}
    return make_optimizer(
        optimizer.name,
        **own,
        schedule=optimizer.schedule,
        weight_decay=optimizer.weight_decay,
        decay=optimizer.decay if optimizer.weight_decay else 'all',
        clip_norm=optimizer.clip_norm,
        warmup_steps=optimizer.warmup_steps,
    )


def build_learner_settings(config: TrackedConfig) -> LearnerSettings:
    """What an update is, under either objective."""
    learner, loss = config.learner, config.loss
    supervised = loss.objective == 'sft'
    most_rows = learner.groups_per_update * (1 if supervised else config.rollout.group_size)
    settings = LearnerSettings(
        row_tokens=learner.row_tokens,
        row_loss_tokens=learner.row_loss_tokens,
        rows_per_microbatch=learner.rows_per_microbatch,
        n_minibatches=learner.n_minibatches,
        epochs=learner.epochs,
        packing='ordinary',
        fill=learner.fill,
        tail_buckets=learner.tail_buckets,
        accumulate=learner.accumulate,
        max_microbatches=-(-most_rows // learner.rows_per_microbatch),
        strategy=config.cluster.strategy,
        dtype=learner.dtype,
        loss_scale=learner.loss_scale,
        objective=loss.objective,
        aggregation=loss.aggregation,
        attention=learner.attention,
    )
    return settings if supervised else _add_policy_settings(config, settings)


def _add_policy_settings(config: TrackedConfig, settings: LearnerSettings) -> LearnerSettings:
    loss = config.loss
    return dataclasses.replace(
        settings,
        packing=config.learner.packing,
        filter_equal_rewards=config.learner.filter_equal_rewards,
        publish_dtype=config.publication.dtype,
        advantage=loss.advantage,
        temperature=config.rollout.temperature,
        clip_epsilon=loss.clip_epsilon,
        clip_epsilon_high=loss.clip_epsilon_high,
        proximal=loss.proximal,
        behavior_weight_cap=loss.behavior_weight_cap,
        entropy_coefficient=loss.entropy_coefficient,
        kl_coefficient=loss.kl_coefficient,
        kl_estimator=loss.kl_estimator if loss.kl_coefficient else 'k3',
        denominator=loss.denominator if config.learner.filter_equal_rewards else 'kept',
        truncated_sampling=loss.truncated_sampling if cuts_softmax(config) else 'refuse',
        max_token_age=config.staleness.max_token_age,
        over_age=config.staleness.over_age,
    )


def build_channel(
    config: TrackedConfig, workdir: pathlib.Path, decoder: Decoder, allocation: Allocation
) -> DeviceChannel | FilesChannel:
    verify = config.publication.verify
    if config.publication.channel == 'device':
        # engines that share a device decode with the copy that the channel holds there
        return DeviceChannel(allocation.engines[0] if allocation.engine_shares(0) else None, verify=verify)
    directory = pathlib.Path(config.publication.directory or workdir / 'publication')
    return FilesChannel(directory, decoder.config, verify=verify)


def cuts_softmax(config: TrackedConfig) -> bool:
    """Whether answers are drawn from a part of the softmax only."""
    return config.rollout.top_k > 0 or config.rollout.top_p < 1


def build_backends(
    config: TrackedConfig, decoder: Decoder, allocation: Allocation
) -> dict[jax.Device, JaxDecodeBackend]:
    """The compiled programs of every device on which engines decode; its engines share them."""
    return {device: build_backend(config, decoder, device) for device in allocation.by_device()}


def build_backend(config: TrackedConfig, decoder: Decoder, device: jax.Device | None = None) -> JaxDecodeBackend:
    rollout = config.rollout
    return JaxDecodeBackend(
        decoder,
        slots=rollout.slots,
        context_tokens=rollout.context_tokens,
        prefill_buckets=tuple(rollout.prefill_buckets),
        decode_steps=rollout.decode_steps,
        filtered=cuts_softmax(config),
        dtype=config.publication.dtype,
        device=device,
    )


def build_sampling(config: TrackedConfig, tokenizer: Tokenizer) -> SamplingParams:
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        stop_tokens=(tokenizer.eos_id,),
    )


def build_gate(config: TrackedConfig) -> StalenessGate:
    lock_step = config.staleness.schedule != 'natural'
    batch = config.learner.groups_per_update
    return StalenessGate(
        groups_per_update=batch,
        eta=float('inf') if lock_step else config.staleness.eta,
        max_running=config.rollout.max_running_groups,
        buffer_capacity=config.buffer.capacity,
        max_admitted=config.run.steps * batch,
    )


def build_schedule(config: TrackedConfig) -> Schedule | None:
    """None for staleness.schedule='natural'; raises ConfigError for a schedule or a file of one that is none."""
    text = config.staleness.schedule
    try:
        return parse_schedule(text, config.run.seed)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # ValueError: bytes that are no text, a number of thousands of digits
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f'staleness.schedule={text!r}: the file or number cannot be read ({reason})') from error


def build_ring(config: TrackedConfig) -> VersionRing | None:
    """The versions that a lock-step schedule may still ask for; None without one."""
    schedule = build_schedule(config)
    return VersionRing(schedule) if schedule else None


def build_settings(config: TrackedConfig) -> LoopSettings:
    return LoopSettings(
        steps=config.run.steps,
        group_size=config.rollout.group_size,
        groups_per_update=config.learner.groups_per_update,
        max_token_age=config.staleness.max_token_age,
        over_age=config.staleness.over_age,
        checkpoint_every=config.checkpoint.every,
        max_failed_groups=config.task.max_failed_groups,
    )
