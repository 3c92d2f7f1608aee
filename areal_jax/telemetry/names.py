"""The names of the metrics of an update, each with its unit and meaning.

A name has the form `stage/quantity_unit`. A Metric is a string and can be used as a key directly. Counts are since the
last update unless the description says otherwise. Each metric has one producer; `metrics.merge` refuses a second one.
Trained tokens are the tokens in the loss; an update without trained tokens lacks the metrics on them.
"""

from __future__ import annotations

import numpy as np


def age_ranges(ages: np.ndarray) -> np.ndarray:
    """The number of each age's range, from 0: int64 in the shape of `ages`, which are >= 0."""
    return np.where(ages < 1, 0, 1 + np.ceil(np.log2(np.maximum(ages, 1)))).astype(np.int64)


def range_label(number: int) -> str:
    """The label of range `number`: '0', '1', '2', '3-4', '5-8', ..."""
    if number < 3:
        return str(number)
    return f'{2 ** (number - 2) + 1}-{2 ** (number - 1)}'


def first_age(label: str) -> int:
    """The lowest age of a range, by which ranges are sorted; 0 for any other text."""
    first = label.split('-')[0]
    return int(first) if first.isdecimal() else 0


class Metric(str):
    """The name of a metric, with `unit` and a one-line `description`."""

    unit: str
    description: str

    def __new__(cls, name: str, unit: str, description: str) -> Metric:
        metric = super().__new__(cls, name)
        metric.unit, metric.description = unit, description
        return metric

    def __getnewargs__(self) -> tuple[str, str, str]:  # type: ignore[override]  # str has one; pickle and copy call it
        return str(self), self.unit, self.description


STEP = Metric('step', 'updates', 'number of the update, from 1; its policy version')
TIME = Metric('time', 's', 'seconds of the clock, evaluations included; a resumed run goes on from its checkpoint')

REWARD_MEAN = Metric('reward/mean', 'reward', 'mean over the trajectories of the batch, filtered groups included')
REWARD_STD = Metric('reward/std', 'reward', 'standard deviation over the same trajectories')
REWARD_UNPARSED = Metric('reward/unparsed_rate', 'share', 'answers of the batch in which no answer could be read')
AUDIT_DISAGREEMENTS = Metric(
    'reward/audit_disagreements',
    'answers',
    'whose second comparison contradicts the reward; absent where none was compared',
)

CODE = 'code/'  # prefix of the next three and, before a label, of its share of scored answers; since the last update
CODE_CPU = Metric('code/cpu_s', 's', 'CPU seconds of the check of an answer of code, in the mean')
CODE_WALL = Metric('code/wall_s', 's', 'wall seconds of such a check, in the mean')
CODE_WAITING = Metric('code/waiting', 'answers', 'that waited for a worker when such an answer came, in the mean')

FRICTION = 'friction/'  # prefix of the next four; only with frictions (section `friction`); of the batch
FRICTION_ACTOR = Metric('friction/actor', 'answers', 'that a friction of the actor met')
FRICTION_REWARD = Metric('friction/reward', 'answers', 'whose reward was drawn from the range of the batch')
FRICTION_UNREWARDED = Metric('friction/unrewarded', 'answers', 'to prompts that never pay')
FRICTION_POLICY_REWARD = Metric(
    'friction/policy_reward',
    'reward',
    'mean reward of the verifier, over answers without friction of the actor to prompts that pay; absent without any',
)

FILTERED_RATE = Metric(
    'reward/filtered_rate', 'share', 'finished groups that task.filter dropped and refilled; absent without a filter'
)

SOURCE = 'source/'  # prefix, only with a mixture (task.sources); followed by the source and one of the next names
SOURCE_DRAWN = 'drawn'  # groups, drawn since the start of the run
SOURCE_GROUPS = 'groups'  # groups of the batch, filtered ones included
SOURCE_EQUAL = 'equal_rewards'  # groups of the batch without a signal: all their rewards are equal
SOURCE_DROPPED = 'dropped'  # groups dropped before the batch since the last update, for any reason
SOURCE_FILTERED_RATE = 'filtered_rate'  # share of the groups finished since then that task.filter dropped, if any ended
SOURCE_REWARD = 'reward_mean'  # reward, mean over its answers in the batch; this and the next: absent without a group
SOURCE_LENGTH = 'answer_tokens_mean'  # generated tokens of these answers, mean
SOURCE_TOKENS = 'tokens'  # generated tokens of its groups that the filter of equal rewards left in the batch
SOURCE_TOKEN_SHARE = 'token_share'  # share of these tokens of all sources; absent if there are none

TOKEN_AGE_MEAN = Metric('staleness/token_age_mean', 'versions', 'mean age of the trained tokens')
TOKEN_AGE_MAX = Metric('staleness/token_age_max', 'versions', 'age of the oldest trained token')
TOKEN_AGE_HISTOGRAM = Metric(
    'staleness/token_age_histogram', 'tokens', 'list: trained tokens of age 0, 1, ...; [] for none'
)
TOKENS_MASKED = Metric('staleness/masked_tokens', 'tokens', 'generated tokens kept out of the loss for their age')
STEPS_INSIDE_MEAN = Metric(
    'staleness/steps_inside_update_mean',
    'steps',
    'optimizer steps of the update before the one that trains a token, mean over tokens and epochs',
)
STEPS_INSIDE_MAX = Metric('staleness/steps_inside_update_max', 'steps', 'largest number of them')
STEP_AGE_MEAN = Metric(
    'staleness/token_age_steps_mean',
    'steps',
    'optimizer steps between the weights that generated a trained token and those it is trained at, mean',
)
STEP_AGE_MAX = Metric('staleness/token_age_steps_max', 'steps', 'largest number of them')
VERSIONS_MEAN = Metric(
    'staleness/versions_per_trajectory_mean',
    'versions',
    'policy versions among the trained tokens of a trajectory, mean',
)
VERSIONS_MAX = Metric('staleness/versions_per_trajectory_max', 'versions', 'largest number of them')

GENERATE_RATE = Metric(
    'throughput/generate_tokens_per_second', 'tokens/s', 'tokens decoded per clock second since the last update'
)
TRAIN_RATE = Metric(
    'throughput/train_tokens_per_second', 'tokens/s', 'trained tokens per clock second (sft: of the update)'
)

LEARNER_RATE_PER_DEVICE = Metric(
    'learner/tokens_per_second_per_device', 'tokens/s', 'tokens read per second of the update and device of the learner'
)
MFU = Metric(
    'learner/mfu',
    'share',
    'model FLOPs per second of the update, of the peak of its devices; absent where that is unknown',
)
GENERATE_RATE_PER_DEVICE = Metric(
    'rollout/tokens_per_second_per_device', 'tokens/s', 'throughput/generate_tokens_per_second by device of the engines'
)

TOKENS_GENERATED = Metric('tokens/generated', 'tokens', 'tokens decoded, trained later or not')
TOKENS_PREFILLED = Metric('tokens/prefilled', 'tokens', 'tokens of prompts prefilled for the first time')
TOKENS_REBUILT = Metric(
    'tokens/rebuilt', 'tokens', 'tokens of interrupted or preempted answers, with their prompts, computed again'
)
# The batch's tokens by fate, for telemetry/token_ledger.py: each metric is a list of the tokens of age 0, 1, ...
TRAINED_BY_AGE = Metric('ledger/trained_by_age', 'tokens', 'list: in the loss of an optimizer step that was applied')
FILTERED_BY_AGE = Metric('ledger/filtered_by_age', 'tokens', 'list: of groups that were left out for equal rewards')
MASKED_BY_AGE = Metric('ledger/masked_by_age', 'tokens', 'list: kept out of the loss for their age')
UNUSED_BY_AGE = Metric('ledger/unused_by_age', 'tokens', 'list: of minibatches none of whose steps was applied')
LEDGER = 'ledger/'  # prefix; followed by a fate (telemetry/token_ledger.py); tokens, since the start of the run
LEDGER_GENERATED = Metric(
    'ledger/generated', 'tokens', 'since the start of the run: the sum of ledger/trained, filtered, masked, ...'
)
TOKENS_TRAINED = Metric('tokens/trained', 'tokens', 'trained tokens, as update/trained_tokens')
GROUPS_TRAINED = Metric('groups/trained', 'groups', 'groups of the batch that the filter of equal rewards left')
GROUPS_DROPPED = 'groups/dropped/'  # prefix; followed by the reason; groups, since the start of the run
# prefix; followed by a control.gate.Bound; clock seconds since the last update in which it kept admission closed
ADMISSION_HELD = 'admission/held_seconds/'
IDLE_SLOTS = 'admission/idle_slot_seconds/'

BUFFER_GROUPS = Metric('buffer/groups', 'groups', 'finished groups waiting when the weights were published')
INTERRUPTIONS = Metric('interruptions', 'interruptions', 'times that new weights met unfinished requests on an engine')
PUBLISH_PAUSE = Metric(
    'publish/pause_seconds', 's', 'longest stop of an engine to load the weights; absent in lock-step'
)
REQUEST_PAUSE_MEDIAN = Metric(
    'publish/request_pause_seconds_p50',
    's',
    'from a swap of weights to the next token of a request that it interrupted, median; absent without any',
)
REQUEST_PAUSE_MAX = Metric('publish/request_pause_seconds_max', 's', 'longest of these pauses')
PREEMPTIONS = Metric('rollout/preemptions', 'requests', 'requests put back because the KV cache was full')
POSITIONS_READ = Metric(
    'rollout/positions_read_ratio', 'ratio', 'positions that attention of decoding read, by those it needed'
)
COMPILATIONS = Metric('compilations', 'programs', 'XLA programs compiled')

UPDATE_GROUPS = Metric('update/trained_groups', 'groups', 'groups of the batch that the filter of equal rewards left')
UPDATE_FILTERED = Metric('update/filtered_equal_rewards', 'groups', 'groups of the batch left out for equal rewards')
UPDATE_TRAJECTORIES = Metric('update/trained_trajectories', 'trajectories', 'trajectories with a trained token')
UPDATE_TOKENS = Metric('update/trained_tokens', 'tokens', 'trained tokens: generated, neither filtered nor masked')
USEFUL_TOKENS = Metric(
    'update/useful_tokens', 'tokens', 'trained tokens of applied optimizer steps whose advantage is not 0'
)
READ_TOKENS = Metric('train/read_tokens', 'tokens', 'prompts and answers that passes of the update read, no padding')
MODEL_FLOPS = Metric('train/model_flops', 'FLOP', 'that the model needs for these passes, see `work_metrics`')
OPTIMIZER_STEPS = Metric('update/optimizer_steps', 'steps', 'optimizer steps that were applied')
SKIPPED_STEPS = Metric('update/skipped_steps', 'steps', 'optimizer steps left out: their gradient was not finite')
BLOCK = Metric('update/block', 'block', 'number of the block that the update trained; absent with optimizer.blocks=1')
# of distributed.clients, at the end of a turn
AVERAGED_BLOCK = Metric('average/block', 'block', 'number of the block that was replaced by its mean over the clients')
AVERAGED_CLIENTS = Metric('average/clients', 'clients', 'clients in that mean')
AVERAGE_SECONDS = Metric('average/seconds', 's', 'from sending that block to its mean, on the wall clock')

EPOCH = Metric('data/epoch', 'epochs', 'passes over the demonstrations so far, the one under way as a fraction')
HELD_OUT = 'held_out/'  # prefix of the next metrics; see learning/objective: Objective.measure_held_out
HELD_OUT_NLL = Metric('held_out/nll', 'nats', 'negative log-likelihood per answer token that is not trained on')
HELD_OUT_TOKENS = Metric('held_out/tokens', 'tokens', 'over which that is the mean')
HELD_OUT_ACCURACY = Metric(
    'held_out/pair_accuracy', 'share', 'pairs not trained on with the chosen answer above the rejected; equal ones half'
)
HELD_OUT_MARGIN = Metric('held_out/margin', 'nats', 'beta times by how much it is above, against the reference; mean')
HELD_OUT_LOSS = Metric('held_out/preference_loss', 'nats', 'preference loss of these pairs')
HELD_OUT_PAIRS = Metric('held_out/pairs', 'pairs', 'over which these are means')

# of the last evaluation during training, in the row of the next update; TensorBoard has them at the evaluated version
EVALUATION = 'evaluation/'  # prefix
EVALUATION_VERSION = Metric('evaluation/version', 'updates', 'policy version that was evaluated beside training')
GREEDY_ACCURACY = Metric('evaluation/greedy_accuracy', 'score', 'mean score of its greedy answers')
VISIBLE_ONLY_SHARE = Metric(
    'evaluation/visible_only_share',
    'share',
    'answers of code that fail a hidden test, of those that pass the others; absent where none passes',
)
# prefix, only with a mixture; followed by the source and greedy_accuracy or sampled_accuracy, as the metrics below
EVALUATION_OF = 'evaluation/source/'
SAMPLED_ACCURACY = Metric('evaluation/sampled_accuracy', 'score', 'mean score of its sampled answers, where it has any')

KEPT_MASS_MEAN = Metric('sampling/kept_mass_mean', 'share', 'softmax mass that top-k or top-p kept, trained tokens')
KEPT_MASS_MIN = Metric('sampling/kept_mass_min', 'share', 'smallest such mass')

MISMATCH_MEAN = Metric('mismatch/mean_abs', 'nats', 'learner against engine log-prob, tokens of the current version')
MISMATCH_MAX = Metric('mismatch/max_abs', 'nats', 'largest of these differences')
MISMATCH_EXACT = Metric('mismatch/exact_share', 'share', 'tokens whose two log-probs are the same float')
MISMATCH_COUNT = Metric('mismatch/n', 'tokens', 'tokens compared')
# only with rollout.weights='int8'; over the same tokens: learning/diagnostics/measurement.py
MISMATCH_KL = Metric('mismatch/kl', 'nats', 'KL of the quantized from the published policy, estimated as k - 1 - ln k')
MISMATCH_SAMPLE_SIZE = Metric(
    'mismatch/effective_sample_size', 'share', '(Σw)²/(nΣw²) of w = published by quantized probability'
)
MISMATCH_RATIO_SHARE = Metric(
    'mismatch/ratio_share', 'ratio', 'mean square of the mismatch by that of the log-ratio of all generated tokens'
)
# only with diagnostics.delta_rule; over the trained tokens of an update's first minibatch
MISMATCH_RULE = Metric('mismatch/delta_rule', 'nats', 'mean difference of log-probs between chunks and single tokens')
MISMATCH_RULE_COUNT = Metric('mismatch/delta_rule_n', 'tokens', 'tokens compared')
# only with diagnostics.latent_form; over the same tokens
MISMATCH_LATENTS = Metric('mismatch/latent_form', 'nats', 'mean difference of log-probs between absorbed and expanded')
MISMATCH_LATENTS_COUNT = Metric('mismatch/latent_form_n', 'tokens', 'tokens compared')
MISMATCH_OF = 'mismatch/of/'  # prefix; followed by the engine and n or mean_abs
MISMATCH_OF_TURN = (
    'mismatch/turn/'  # prefix, for answers of several turns; followed by the turn (1, 2, ...) and n or mean_abs
)

# prefix; followed by a range of ages and tokens, effective_sample_size, clip_fraction or kl: as
# the metrics loss/... of these names, over the trained tokens of these ages
BY_AGE = 'by_age/'

RATIO = 'ratio/'  # prefix of the split of the importance ratio, learning/diagnostics/ratio_split.py; nats
RATIO_TOKENS = Metric('ratio/tokens', 'tokens', 'trained tokens whose importance ratio was split')
RATIO_LEFT_RING = Metric(
    'ratio/left_ring_tokens', 'tokens', 'trained tokens of sampled answers whose version is not in the ring any more'
)
RATIO_ERROR = Metric(
    'ratio/identity_error',
    'nats',
    'largest difference between a log-ratio and the sum of its parts; rounding, or a bug',
)
RATIO_SECONDS = Metric('ratio/seconds', 's', 'that the split took, on the wall clock')
RATIO_SHARE = Metric('ratio/share', 'share', 'of the seconds of the update with the split')
RATIO_OF_AGE = 'ratio/of_age/'  # prefix; followed by a range of ages and a part
RATIO_OF_UPDATE = 'ratio/of_update/'  # prefix; followed by how many updates back (1: the last one), and a part
RATIO_OF_ENGINE = 'ratio/of_engine/'  # prefix; followed by the engine, and tokens, mismatch_mean or mismatch_rms

# with telemetry.energy='auto', since the last update, evaluations during training included: telemetry/energy_meters.py
ENERGY = Metric(
    'energy/joules', 'J', 'of all below that are joules, modelled ones in the middle; absent where devices are left out'
)
ENERGY_PER_GENERATED = Metric('energy/joules_per_generated_token', 'J/token', 'energy/joules by tokens/generated')
ENERGY_PER_TRAINED = Metric('energy/joules_per_trained_token', 'J/token', 'energy/joules by tokens/trained')
ENERGY_PER_USEFUL = Metric('energy/joules_per_useful_token', 'J/token', 'energy/joules by update/useful_tokens')
ENERGY_NVML = Metric('energy/nvml_joules', 'J', "measured: the counters of the run's GPUs, whoever uses these")
ENERGY_RAPL = Metric('energy/rapl_joules', 'J', 'measured: all CPU packages of this machine, whatever runs on them')
ENERGY_MODELLED = Metric(
    'energy/modelled_joules', 'J', 'of devices without a counter: seconds by state times the middle of published watts'
)
ENERGY_MODELLED_LOW = Metric('energy/modelled_joules_low', 'J', 'the same with the lowest published watts')
ENERGY_MODELLED_HIGH = Metric('energy/modelled_joules_high', 'J', 'the same with the highest published watts')
ENERGY_IDLE = Metric(
    'energy/idle_joules', 'J', 'modelled: idle seconds times the middle of published watts; a part of energy/joules'
)
ENERGY_IDLE_LOW = Metric('energy/idle_joules_low', 'J', 'the same with the lowest published watts')
ENERGY_IDLE_HIGH = Metric('energy/idle_joules_high', 'J', 'the same with the highest published watts')
ENERGY_ACTIVITY = Metric(
    'energy/decode_activity', 'share', 'log of the rows decoded by log of 128, mean over the seconds of decoding'
)
ENERGY_SECONDS = 'energy/seconds/'  # prefix; followed by train, prefill, decode or idle; seconds of devices

ROUTES = 'routes/'  # prefix of metrics by learning/diagnostics/measurement.py, for a model with experts
ROUTES_RECORDED = Metric('routes/recorded', 'share', 'of the trained tokens, those whose experts an engine recorded')
ROUTE_PROMPTS = Metric(
    'routes/prompts_differ', 'answers', 'whose prompt reached other experts in the engine than that of the first answer'
)
ROUTES_OF_AGE = 'routes/of_age/'  # prefix; followed by a range of ages, and tokens, sets_changed or tokens_changed
EXPERT_LOAD = Metric('experts/load', 'ratio', 'tokens of the fullest expert to the mean of its layer, over the layers')
EXPERTS_DEAD = Metric('experts/dead', 'experts', 'of all layers, those that no token of the update reached')
# prefixes of lists in expert_loads.jsonl, the tokens that reached each expert (learning/diagnostics/expert_loads.py)
EXPERT_LOADS = 'experts/loads/'  # followed by a layer
EXPERT_LOADS_OF_AGE = 'experts/loads_of_age/'  # followed by a range of ages, then a layer or `tokens`

HISTOGRAMS = (TOKEN_AGE_HISTOGRAM, TRAINED_BY_AGE, FILTERED_BY_AGE, MASKED_BY_AGE, UNUSED_BY_AGE)  # lists of counts
METRICS: dict[str, Metric] = {name: name for name in tuple(globals().values()) if isinstance(name, Metric)}
PREFIXES = (
    SOURCE,
    EVALUATION_OF,
    GROUPS_DROPPED,
    ADMISSION_HELD,
    IDLE_SLOTS,
    MISMATCH_OF,
    MISMATCH_OF_TURN,
    LEDGER,
    BY_AGE,
    ROUTES,
    EXPERT_LOADS,
    EXPERT_LOADS_OF_AGE,
    RATIO,
    ENERGY_SECONDS,
    'loss/',
    'train/',
    'update/',
)  # the last three are prefixes of the learner's own metrics


def is_declared(name: str) -> bool:
    """Whether a metric of this name belongs to the schema."""
    return name in METRICS or any(name.startswith(prefix) and name != prefix for prefix in PREFIXES)
