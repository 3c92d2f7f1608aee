"""The metrics of an update, measured after its last step from values that the steps computed anyway. numpy only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from areal_jax.columns import ROUTED_EXPERTS
from areal_jax.learning.diagnostics.compared_tokens import metrics_by_age
from areal_jax.learning.diagnostics.expert_loads import load_metrics
from areal_jax.learning.diagnostics.ratio_split import RatioSampler, by_range, flatten
from areal_jax.learning.objective.counting import data_metrics, find_starts, kept_mass_metrics
from areal_jax.learning.optimizer import step_metrics
from areal_jax.learning.packed_rows import PADDING
from areal_jax.learning.passes import StepResult, Trained, Update, first_logprobs
from areal_jax.learning.programs import LearnerState
from areal_jax.learning.settings import Brake, LearnerSettings, sequence_effective_sample_size
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.models.weights import Lora, WeightSpec, is_adapter, weight_table
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import merge
from areal_jax.telemetry.names import MISMATCH_OF, MISMATCH_OF_TURN
from areal_jax.types import NOT_GENERATED, PackedBatch, TrajectoryGroup


def work_metrics(
    config: ModelConfig, lora: Lora | None, groups: Sequence[TrajectoryGroup], packing: str, epochs: int
) -> dict[str, float]:
    """Tokens that the passes of an update read, and the floating-point operations that the model needs for them.

    PaLM (arXiv 2204.02311), appendix B, counts 6 N + 12 L H D T per token of a training pass: N weights in matrices (a
    multiplication and an addition for each in the forward pass, twice that in the backward one), L layers, H query
    heads of width D, T tokens of the sequence. What is special here:

      - N has no embedding lookup, and the head V d counts for tokens in the loss alone: no other logits are computed.
      - T is the length of the token's own sequence: prompt and answer, or the prompt alone for a prompt that the
        answers of a group share, which is read once. A sliding window bounds T. As in PaLM, the causal mask does not
        halve T.
      - LoRA needs no gradient of the frozen weights: 4 N for them, 6 for every weight of an adapter.
      - N counts the router, and only the experts that a token reaches.
      - Not counted: recomputation by `learner.remat`, padding, and passes that only compute log-probs (proximal with
        several optimizer steps, reference). So this is the utilisation by the model (MFU), not by the hardware.

    Args:
      groups: the trained ones.
      packing: 'shared_prompt' reads the prompt of a group once, 'ordinary' once per answer.
    """
    body, head = matrix_flops(config, lora)
    spans = [span for group in groups for span in _spans(group, packing)]
    tokens = sum(count for count, _ in spans)
    flops = body * tokens + head * sum(map(_loss_tokens, groups))
    flops += sum(count * attention_flops(config, length) for count, length in spans)
    return {names.READ_TOKENS: float(tokens * epochs), names.MODEL_FLOPS: float(flops * epochs)}


def matrix_flops(config: ModelConfig, lora: Lora | None = None) -> tuple[int, int]:
    """Operations of a training pass per token in the matrices of all layers, and per loss token in the head."""
    matrices = [spec for spec in weight_table(config, lora).values() if spec.multiplies]
    frozen = 4 if lora else 6
    cost = sum((6 if is_adapter(spec.path) else frozen) * _active(spec, config) for spec in matrices)
    if config.delta:  # forward, and twice that for the gradient, whether or not weights are frozen
        cost += 3 * config.n_delta_layers * config.delta.rule_flops
    return cost, frozen * config.vocab_size * config.d_model


def active_parameters(config: ModelConfig) -> int:
    """The number of weights that a token meets: all except the weights of experts that it does not reach."""
    table = weight_table(config, None).values()
    return sum(
        _active(spec, config) if '/experts/' in spec.path else math.prod(spec.shape) * len(spec.paths) for spec in table
    )


def _active(spec: WeightSpec, config: ModelConfig) -> int:
    """The number of weights in all layers that a token meets; of experts, only the ones that it reaches."""
    if '/experts/' not in spec.path:
        return math.prod(spec.shape) * len(spec.layers)
    assert config.experts is not None
    return config.experts.per_token * math.prod(spec.shape[1:]) * len(spec.layers)


def attention_flops(config: ModelConfig, length: int) -> int:
    """Operations of a training pass per token in a sequence of `length` tokens, for scores and weighted values."""
    layers = (layer for layer in range(config.n_layers) if config.mixer(layer) == 'attention')
    seen = sum(min(length, config.window(layer) or length) for layer in layers)
    return 12 * config.n_heads * config.mixed_dim * seen


def _spans(group: TrajectoryGroup, packing: str) -> Iterator[tuple[int, int]]:
    """(tokens read, length of their sequence); the last token of an answer is predicted and not read."""
    if packing == 'shared_prompt':
        for prompt in {t.prompt.tokens.tobytes(): len(t.prompt.tokens) for t in group.trajectories}.values():
            yield prompt, prompt
    for trajectory in group.trajectories:
        prompt = len(trajectory.prompt.tokens)
        answer = sum(len(segment.tokens) for segment in trajectory.segments) - 1
        yield answer if packing == 'shared_prompt' else prompt + answer, prompt + answer


def _loss_tokens(group: TrajectoryGroup) -> int:
    segments = (segment for trajectory in group.trajectories for segment in trajectory.segments)
    return sum(len(segment.tokens) for segment in segments if segment.policy_version != NOT_GENERATED)


_MOST_TURNS = 8  # with a metric each; the last metric includes all later turns
Metrics = Mapping[str, Any]  # floats by name, and for a histogram a list of floats


def measure(
    update: Update, settings: LearnerSettings, decoder: Decoder, state: LearnerState, split: RatioSampler | None = None
) -> Metrics:
    """Metrics of data, packing and steps; one that is not defined (the mean over nothing) is absent.

    Args:
      state: the weights after the update.
      split: measures the split of the importance ratio, if asked for.
    """
    trained, kept, version = update.trained, update.kept, update.version
    results, batches = trained.results, trained.batches
    data, sampling = data_metrics(update.groups, kept), kept_mass_metrics(kept, update.oldest)
    steps = step_metrics([result.step for result in results])
    by_age = metrics_by_age(settings, batches, results, trained.known, version)
    producers: dict[str, Metrics] = {
        'data': data,
        'ages': age_metrics(kept, batches, version),
        'packing': update.rows.metrics(),
        'routes': route_metrics(kept, batches, results, version),
        'expert_loads': load_metrics(decoder.config, batches, results, version),
        'sampling': sampling,
        'steps': steps,
        'loss': loss_metrics(results, settings),
    }
    if settings.objective.learns_from_answers:
        compared, before = batches_before(trained)
        engines = [trajectory.engine for group in kept for trajectory in group.trajectories]
        applied = trained.was_applied(len(batches))
        producers |= {
            'mismatch': mismatch_metrics(compared, before, version, engines),
            'quantization': quantization_metrics(compared, before, version)
            if settings.rollout.weights == 'int8'
            else {},
            'delta_rule': rule_metrics(trained),
            'latent_form': latent_metrics(trained),
            'by_age': by_age,
            'inside': inside_metrics(batches, trained.steps_applied()),
            'staleness': staleness_metrics(settings.brake, results, batches),
            'fates': fate_metrics(update.groups, kept, batches, applied, version),
            'useful': useful_metrics(batches, applied),
        }
    work = work_metrics(decoder.config, decoder.lora, update.read, update.packing, settings.learner.epochs)
    ratio = {} if split is None else split.measure_update(update, state)
    return merge(**producers, work=work, ratio=ratio)


def rule_metrics(trained: Trained) -> Metrics:
    """The difference of log-probs between the rule of delta nets in chunks, as trained, and token by token.

    Both are of the same weights and rows, so that this part of the mismatch is that of the forms alone.
    """
    if trained.single_tokens is None:
        return {}
    mask = trained.batches[0].loss_mask
    chunks, tokens = (np.reshape(one, mask.shape)[mask] for one in (trained.results[0].logprobs, trained.single_tokens))
    if not mask.any():
        return {names.MISMATCH_RULE_COUNT: 0.0}
    mean = float(np.abs(chunks.astype(np.float64) - tokens).mean())
    return {names.MISMATCH_RULE_COUNT: float(mask.sum()), names.MISMATCH_RULE: mean}


def latent_metrics(trained: Trained) -> Metrics:
    """The difference of log-probs between absorbed latent attention, as engines compute, and expanded, as trained.

    Both are of the same weights in the dtype of engines, rows and, where they are recorded, routes.
    """
    if trained.of_latents is None:
        return {}
    mask = trained.batches[0].loss_mask
    if not mask.any():
        return {names.MISMATCH_LATENTS_COUNT: 0.0}
    mean = float(np.abs(np.reshape(trained.of_latents, mask.shape)[mask].astype(np.float64)).mean())
    return {names.MISMATCH_LATENTS_COUNT: float(mask.sum()), names.MISMATCH_LATENTS: mean}


def age_metrics(kept: Sequence[TrajectoryGroup], batches: Sequence[PackedBatch], version: int) -> Metrics:
    """Age of the trained tokens when the batch was formed (version - policy version), and how versions mix in them.

    Masked tokens are counted from the groups, because packing drops a minibatch that has only such tokens. Entry a of
    the histogram is the number of trained tokens of age a; it is empty if nothing is trained.
    """
    trained = flatten([b.loss_mask for b in batches], bool)  # [all loss tokens], as the next two
    ids = flatten([b.trajectory_ids for b in batches], np.int32)
    ages = version - flatten([b.policy_versions for b in batches], np.int32)
    segments = (s for g in kept for t in g.trajectories for s in t.segments)
    generated = sum(len(s.tokens) for s in segments if s.policy_version != NOT_GENERATED)
    metrics = {
        'update/trained_tokens': float(trained.sum()),
        'update/trained_trajectories': 0.0,
        'staleness/masked_tokens': float(generated - trained.sum()),
        'staleness/token_age_histogram': np.bincount(ages[trained]).astype(float).tolist(),
    }
    if trained.any():
        versions_of = np.unique(np.stack([ids[trained], ages[trained]]), axis=1)[0]  # one entry per (trajectory, age)
        counts = np.unique(versions_of, return_counts=True)[1]
        metrics |= {
            'staleness/token_age_mean': float(ages[trained].mean()),
            'staleness/token_age_max': float(ages[trained].max()),
            'update/trained_trajectories': float(len(counts)),
            'staleness/versions_per_trajectory_mean': float(counts.mean()),
            'staleness/versions_per_trajectory_max': float(counts.max()),
        }
    return metrics


def fate_metrics(
    groups: Sequence[TrajectoryGroup],
    kept: Sequence[TrajectoryGroup],
    batches: Sequence[PackedBatch],
    applied: Sequence[bool],
    version: int,
) -> Metrics:
    """Counts by age, for the token ledger, what became of every generated token of the update's groups.

    Args:
      groups: all groups of the update; `kept` are the ones that the filter of equal rewards left.
      applied: per batch, whether one of its optimizer steps was applied.
    """
    everything, left = _generated_by_age(groups, version), _generated_by_age(kept, version)
    size = len(everything)
    left = np.pad(left, (0, size - len(left)))
    trained, unused = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for batch, was_applied in zip(batches, applied, strict=True):
        in_loss = trained if was_applied else unused
        in_loss += np.bincount(version - batch.policy_versions[batch.loss_mask], minlength=size)
    fates = {
        names.TRAINED_BY_AGE: trained,
        names.FILTERED_BY_AGE: everything - left,
        names.MASKED_BY_AGE: left - trained - unused,
        names.UNUSED_BY_AGE: unused,
    }
    return {str(name): np.trim_zeros(tokens, 'b').astype(float).tolist() for name, tokens in fates.items()}


def useful_metrics(batches: Sequence[PackedBatch], applied: Sequence[bool]) -> dict[str, float]:
    """The number of trained tokens that move the weights: in batches with an applied step, with an advantage != 0."""
    useful = [
        np.count_nonzero(batch.advantages[batch.loss_mask])
        for batch, was_applied in zip(batches, applied, strict=True)
        if was_applied
    ]
    return {str(names.USEFUL_TOKENS): float(sum(useful))}


def inside_metrics(batches: Sequence[PackedBatch], applied: Sequence[bool]) -> dict[str, float]:
    """Mean and maximum, over tokens and epochs, of the applied steps of the update before the one that trains a token.

    Args:
      applied: per step; step i is on batch i % len(batches).
    """
    if not batches:
        return {}
    tokens = [float(batch.loss_mask.sum()) for batch in batches]
    weights = [tokens[number % len(batches)] for number in range(len(applied))]
    before = [float(sum(applied[:number])) for number in range(len(applied))]
    mean = sum(weight * steps for weight, steps in zip(weights, before, strict=True)) / sum(weights)
    return {str(names.STEPS_INSIDE_MEAN): mean, str(names.STEPS_INSIDE_MAX): max(before)}


def mismatch_metrics(
    batches: Sequence[PackedBatch], logprobs: Sequence[np.ndarray], version: int, engines: Sequence[str] = ()
) -> dict[str, float]:
    """|behavior log-prob - the learner's log-prob| over generated tokens of the current version.

    Both log-probs are of the full softmax, also if the engine sampled with top-k or top-p.

    Args:
      logprobs: per batch float32 [M, R, N] of the weights of `version`, i.e. before the update.
      engines: for each trajectory of the update, the engine of its last segment; () = no metrics by engine.
    """
    differences, trajectories, turns = [np.zeros(0)], [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
    for batch, learned in zip(batches, logprobs, strict=True):
        current = (batch.trajectory_ids >= 0) & (batch.policy_versions == version)
        differences.append(np.abs(batch.behavior_logprobs.astype(np.float64) - learned)[current])
        trajectories.append(batch.trajectory_ids[current])
        turns.append(_number_turns(batch)[current])
    all_differences = np.hstack(differences)
    if not len(all_differences):
        return {'mismatch/n': 0.0}
    return {
        'mismatch/n': float(len(all_differences)),
        'mismatch/mean_abs': float(all_differences.mean()),
        'mismatch/max_abs': float(all_differences.max()),
        'mismatch/exact_share': float((all_differences == 0).mean()),
        **_mismatch_by_engine(all_differences, np.hstack(trajectories), engines),
        **_mismatch_by_turn(all_differences, np.hstack(turns)),
    }


def _mismatch_by_engine(differences: np.ndarray, trajectories: np.ndarray, engines: Sequence[str]) -> dict[str, float]:
    found = {}
    for engine in sorted(set(engines)):
        own = differences[np.isin(trajectories, [index for index, name in enumerate(engines) if name == engine])]
        if len(own):
            found[f'{MISMATCH_OF}{engine}/n'] = float(len(own))
            found[f'{MISMATCH_OF}{engine}/mean_abs'] = float(own.mean())
    return found


def _mismatch_by_turn(differences: np.ndarray, turns: np.ndarray) -> dict[str, float]:
    """The number of tokens in each turn and their mean difference; {} if no row has a second turn."""
    turns = np.minimum(turns, _MOST_TURNS)
    found: dict[str, float] = {}
    for turn in np.unique(turns) if turns.max(initial=1) > 1 else ():
        own = differences[turns == turn]
        found |= {
            f'{MISMATCH_OF_TURN}{turn}/n': float(len(own)),
            f'{MISMATCH_OF_TURN}{turn}/mean_abs': float(own.mean()),
        }
    return found


def _number_turns(batch: PackedBatch) -> np.ndarray:
    """int64 [M, R, N]: 1 for the first generated tokens of a trajectory, 2 after its environment's tokens, and so on.

    All loss tokens are generated, so the tokens of the environment are a gap in their positions.
    """
    is_first = np.diff(batch.trajectory_ids, axis=-1, prepend=-2) != 0
    positions = np.take_along_axis(batch.positions, batch.sources, axis=-1)
    begins = ~is_first & (np.diff(positions, axis=-1, prepend=0) > 1)
    count = np.cumsum(begins, axis=-1)
    return 1 + count - np.maximum.accumulate(np.where(is_first, count, 0), axis=-1)


def _generated_by_age(groups: Sequence[TrajectoryGroup], version: int) -> np.ndarray:
    """int64: generated tokens of age 0, 1, ...; counted from segments, because packing leaves some groups out."""
    segments = [s for g in groups for t in g.trajectories for s in t.segments if s.policy_version != NOT_GENERATED]
    ages = np.array([version - s.policy_version for s in segments], np.int64)
    return np.bincount(ages, [len(s.tokens) for s in segments]).astype(np.int64)


# How far the 8-bit policy that generated is from the policy whose weights were published.
#
# μ is the policy of the engines, whose log-probs are recorded in answers; π_u is the learner's policy of the same
# version u. The passes of the update give log π_n of tokens of the trained version n, so this needs no other pass.


def quantization_metrics(
    batches: Sequence[PackedBatch], logprobs: Sequence[np.ndarray], version: int
) -> dict[str, float]:
    """Divergence, effective sample size and share of the importance ratio, {} without tokens of the version.

    The share is the mean square of log π_n - log μ over tokens of version n, divided by the mean square over all
    generated tokens: the part of the behavior-to-proximal ratio that existed before any update moved the weights.

    Args:
      logprobs: per batch float32 [M, R, N] of the weights of `version`.
    """
    generated = [batch.policy_versions[batch.trajectory_ids != PADDING] for batch in batches]
    versions = flatten(generated, np.int64)
    log_ratios = flatten(
        [
            (learned.astype(np.float64) - batch.behavior_logprobs)[batch.trajectory_ids != PADDING]
            for batch, learned in zip(batches, logprobs, strict=True)
        ],
        np.float64,
    )
    own = log_ratios[versions == version]
    if not len(own):
        return {}
    weights = np.exp(own)
    square = float(np.mean(log_ratios**2))
    return {
        str(names.MISMATCH_KL): float(np.mean(weights - 1 - own)),
        str(names.MISMATCH_SAMPLE_SIZE): float(weights.sum() ** 2 / (len(own) * np.sum(weights**2))),
        str(names.MISMATCH_RATIO_SHARE): float(np.mean(own**2)) / square if square else 0.0,
    }


# Which experts the tokens of an update reach: the choice of the routers, the engines' record, loads.
#
# Always measures the choice of the routers, even if the recorded one is followed (learner.routes='replay'), so that
# metrics of runs with and without replay mean the same. Measured with the weights before the update, on the minibatch
# of the first step: at age 0 a difference comes from numerics alone, at higher ages also from the updates in between.


def route_metrics(
    kept: Sequence[TrajectoryGroup], batches: Sequence[PackedBatch], results: Sequence[StepResult], version: int
) -> dict[str, float]:
    """Metrics of the routes; {} for a model without experts. Without a record, the parts that need it are absent.

    Args:
      kept: the groups that were packed.
      results: one for each step; the first is of the first batch.
      version: of the weights before the update.
    """
    if not results or results[0].routes is None:
        return {}
    metrics = _loads([result.routes.loads for result in results if result.routes is not None])
    if (recorded := batches[0].inputs.get(ROUTED_EXPERTS.name)) is None:
        return metrics
    metrics[str(names.ROUTE_PROMPTS)] = float(count_differing_prompts(kept))
    return metrics | _differences(batches[0], recorded, results[0].routes.differs, version)


def _loads(loads: Sequence[np.ndarray]) -> dict[str, float]:
    total = np.sum(loads, axis=0, dtype=np.float64)  # [layers, experts]
    fullest = total.max(axis=1) / np.maximum(total.mean(axis=1), 1e-30)
    return {str(names.EXPERT_LOAD): float(fullest.mean()), str(names.EXPERTS_DEAD): float((total == 0).sum())}


def _differences(batch: PackedBatch, recorded: np.ndarray, differs: np.ndarray, version: int) -> dict[str, float]:
    layers = recorded.shape[-2]
    first = np.take_along_axis(recorded[..., 0, 0], batch.sources, axis=-1)  # [M, R, N]
    known = batch.loss_mask & (first != np.iinfo(recorded.dtype).max)
    trained = int(batch.loss_mask.sum())
    metrics = {str(names.ROUTES_RECORDED): float(known.sum() / trained)} if trained else {}
    changed = differs[known]
    if not len(changed):
        return metrics
    metrics |= _shares(names.ROUTES, changed, layers)
    for label, chosen in by_range(version - batch.policy_versions[known]):
        metrics |= _shares(f'{names.ROUTES_OF_AGE}{label}/', changed[chosen], layers)
    return metrics


def _shares(prefix: str, changed: np.ndarray, layers: int) -> dict[str, float]:
    """Shares of changed routes; `changed` int [tokens]: the number of layers in which the sets differ."""
    return {
        f'{prefix}tokens': float(len(changed)),
        f'{prefix}sets_changed': float(changed.mean() / layers),
        f'{prefix}tokens_changed': float((changed > 0).mean()),
    }


def count_differing_prompts(groups: Sequence[TrajectoryGroup]) -> int:
    """The number of answers whose engine recorded other routes for the prompt than for the group's first answer.

    New weights arrived between the two; such answers do not share a copy of the prompt.
    """
    count = 0
    for group in groups:
        known = [t.segments[0].context.get(ROUTED_EXPERTS.name) for t in group.trajectories if t.segments and not t.row]
        given = [context for context in known if context is not None]
        count += sum(not np.array_equal(given[0], context) for context in given[1:])
    return count


def merge_metrics(metrics: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Joins the metrics of micro-batches, each value a scalar or an array over micro-batches."""
    merged = {}
    for name in metrics[0] if metrics else ():
        values = np.hstack([m[name] for m in metrics]).astype(np.float64)
        merged[name] = float(values.max() if name.endswith('_max') else values.sum())
    return merged


def loss_metrics(results: Sequence[StepResult], settings: LearnerSettings) -> dict[str, float]:
    """The mean loss of the steps, the metrics of the objective, and the balance of routers if experts are evened."""
    merged = merge_metrics([microbatch for result in results for microbatch in result.microbatches])
    metrics = {'loss/value': merged['loss_sum'] / len(results)} if results else {}
    metrics |= settings.objective.metrics(merged)
    if results and settings.learner.evens_experts:
        metrics['loss/router_balance'] = merged['router_balance_sum'] / len(results)
    return metrics


def batches_before(trained: Trained) -> tuple[Sequence[PackedBatch], list[np.ndarray]]:
    """(batches whose log-probs under the weights before the update are known, these log-probs float32 [M, R, N])."""
    before = [first_logprobs(trained.results, trained.batches)] if trained.results else []
    before += [known.proximal for known in trained.known[1:] if known.proximal is not None]
    return trained.batches[: len(before)], before


def staleness_metrics(brake: Brake, results: Sequence[StepResult], batches: Sequence[PackedBatch]) -> dict[str, float]:
    """Means over the steps of the values that brakes of the learning rate read."""
    if not results:
        return {}
    mean = lambda values: sum(values) / len(results)
    sizes = []
    for number, result in enumerate(results):
        batch = batches[number % len(batches)]
        policy = np.reshape(result.logprobs, batch.loss_mask.shape)
        starts = find_starts(batch.trajectory_ids)
        sizes.append(float(sequence_effective_sample_size(policy, batch.behavior_logprobs, batch.loss_mask, starts)))
    metrics = {'loss/sequence_effective_sample_size': mean(sizes)}
    if brake.shown or brake.kind == 'lag':
        metrics['update/lag_steps'] = mean([result.lag for result in results])
    if brake.kind == 'lag':
        metrics['update/brake'] = mean([result.factor for result in results])
    return metrics
