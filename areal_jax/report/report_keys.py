"""The keys of report.json, with types and units. None means: not measured.

Made by report.py and the modules that it calls, read by caveats.py and the pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NotRequired, TypedDict

from areal_jax.report.agents import AgentSummary
from areal_jax.report.aggregates import Ends as Ends
from areal_jax.report.aggregates import MeanMax as MeanMax
from areal_jax.report.aggregates import Mismatch, ServerRow
from areal_jax.report.engines.classes import ClassRow
from areal_jax.report.event_log import PublicationRow
from areal_jax.report.pages.energy_section import EnergySummary
from areal_jax.workers.sandbox.sandbox_trial import SandboxRecord


class Interval(TypedDict):
    """A mean score with its 95% interval; `low` and `high` are None if n is too small for one."""

    mean: float
    low: float | None
    high: float | None
    n: int


class GreedyAccuracy(TypedDict):
    before: Interval | None
    after: Interval | None


class SampledAccuracy(GreedyAccuracy):
    gain: Interval | None  # on the same problems


class Accuracy(TypedDict):
    """On held-out problems."""

    greedy: GreedyAccuracy
    sampled: SampledAccuracy


class CurveRow(TypedDict):
    """One version that was evaluated during training."""

    version: int
    greedy: Interval
    sampled: Interval | None
    seconds: float  # on the clock, from the fetch of the weights to the last score
    lane_seconds: float  # seconds of the engines' lanes
    lane_share: float | None  # of the busy seconds of these lanes meanwhile


class CurveEnds(TypedDict):
    """The evaluations before and after training, on the problems and samples of the rows between them."""

    greedy: GreedyAccuracy
    sampled: GreedyAccuracy


class StepAge(MeanMax):
    """In optimizer steps, including the steps of a token's own update."""

    inside_mean: float | None  # the part inside the update of a token
    inside_max: float | None


class AgeHistograms(TypedDict):
    """Trained tokens by age when their batch was formed, as pairs (age, tokens), ascending."""

    publications: list[list[int]]
    steps: list[list[int]]  # without steps of a token's own update; empty if the steps of an update are unknown


class LostAnswers(TypedDict):
    """Answers that no engine finished, and finished ones: if their lengths differ, the trained data are biased."""

    lost: int
    lost_tokens_mean: float  # tokens received before the loss
    finished: int
    finished_tokens_mean: float


class Groups(TypedDict):
    drawn: int
    trained: int
    filtered: int  # left out of their batch for equal rewards
    dropped: Mapping[str, int]  # by reason
    filtered_rate: float | None  # share of the finished groups that task.filter dropped; None if it dropped none
    lost: NotRequired[LostAnswers]  # absent if engines finished every answer


class Tokens(TypedDict):
    generated: int
    trained: float


class OptimizerSteps(TypedDict):
    applied: int
    skipped: int  # their gradient was not finite
    updates_by_block: NotRequired[Mapping[str, int]]  # absent if every update trains all leaves


class ShareOfAnswers(Ends):
    mean: float | None  # over the updates


class Audit(TypedDict):
    """Answers whose score was compared a second time (task.audit_fraction)."""

    answers: int
    disagreements: int  # kept in audit.jsonl
    undecided: int


class BeforeAfter(TypedDict):
    before: float | None
    after: float | None


class MedianMax(TypedDict):
    median: float | None
    max: float | None


class Work(TypedDict):
    tokens: int
    seconds: float  # of the lanes of all engines


class EngineWork(TypedDict):
    """Work of the engines in training."""

    generated: Work
    prefilled: Work  # prompts, the first time; before version 4 of the log also rebuilt tokens
    rebuilt: Work | None  # interrupted and preempted answers with their prompts; None before version 4 of the log


class AttentionPositions(TypedDict):
    """Positions of one layer, summed over rows and steps of decoding."""

    live: int  # positions that the rows had
    read: int  # positions that attention read, padding included


class Preemptions(TypedDict):
    """Requests that were put back because the KV cache was full."""

    requests: int
    tokens: int  # of their caches, computed again later


class Throughput(TypedDict):
    generate_tokens_per_second: float | None
    train_tokens_per_second: float | None
    generate_tokens_per_second_per_device: float | None  # this and the next two: median over the updates
    learner_tokens_per_second_per_device: float | None
    mfu: float | None  # of the updates; None on devices whose peak is unknown


class Busy(TypedDict):
    """Share of the window in which the lanes are occupied."""

    rollout: float | None  # mean over the engines
    learner: float | None


class Time(TypedDict):
    """Seconds of an update; limit.Limit has the meaning of each."""

    generate: float | None
    train: float | None
    publish: float | None
    ideal: float | None
    achieved: float | None
    ideal_rule: str


class Lag(TypedDict):
    max: float | None  # seconds, after warm-up


class TokenFates(TypedDict):
    """Fates of the generated tokens (telemetry/token_ledger.py); the sum over `fates` is `generated`."""

    generated: int
    fates: Mapping[str, int]  # trained, filtered, masked, unused, dropped/REASON, unfinished
    by_age: Mapping[str, list[int]]  # tokens of age 0, 1, ... when the fate was decided; not of the unfinished
    by_version: Mapping[str, list[int]] | None  # tokens of policy version 0, 1, ...; None with servers
    fault: str  # why the ledger does not close; '' = it does


class Spread(TypedDict):
    """Answers, each counted with the share of its tokens that have met a fate."""

    answers: float
    length_mean: float | None  # tokens of the whole answer
    length_distance: float | None  # Kolmogorov-Smirnov distance from the lengths of all answers
    reward_mean: float | None
    reward_distance: float | None  # Kolmogorov-Smirnov distance from the rewards of all answers


class Bias(TypedDict):
    """Trained answers against masked or dropped ones."""

    distance: float  # of Kolmogorov and Smirnov
    critical: float  # value that the distance exceeds by chance in 1% of the cases
    trained_mean: float
    left_out_mean: float


class Censoring(TypedDict):
    spreads: Mapping[str, Spread]  # generated, trained, filtered, masked, unused, dropped; without fates of no answer
    length_bias: Bias | None  # this and the next: None if nothing was left out
    reward_bias: Bias | None  # without answers that a filter of rewards leaves out


class AgeRow(TypedDict):
    """Trained tokens of a range of ages, in publications; means over the updates, weighted by tokens."""

    age: str  # '0', '1', '2', '3-4', '5-8', ...
    tokens: int  # counted in every epoch
    effective_sample_size: float | None  # (Σ w)² / (n Σ w²) of the behavior weights of an update
    clip_fraction: float | None
    kl: float | None  # of behavior and policy, nats


class Moments(TypedDict):
    mean: Interval | None  # the updates are the clusters
    rms: float | None


class RatioRow(TypedDict):
    of: str  # a range of ages, of updates back, or an engine
    tokens: int
    parts: Mapping[str, Moments]


class RatioSplit(TypedDict):
    """The importance ratio by cause, in nats (learning/diagnostics/ratio_split.py)."""

    tokens: int
    left_ring_tokens: int  # tokens of sampled answers whose version had left the ring
    identity_error: float | None  # largest difference between a log-ratio and the sum of its parts
    parts: Mapping[str, Moments]  # total, mismatch, drift, inside
    by_age: list[RatioRow]  # mismatch, drift
    by_update: list[RatioRow]  # drift of the update that is 1, 2, ... back
    by_engine: list[RatioRow]  # mismatch
    seconds: float
    share: float | None  # of the seconds of the updates


class RouteRow(TypedDict):
    """Differences between the learner's routing and the engines' record, for tokens of a range of ages."""

    age: str  # '' = all ages
    tokens: int
    sets_changed: float | None  # share of the sets of experts, one a token and layer
    tokens_changed: float | None  # share of the tokens with such a set
    routing_rms: float | None  # nats: log-prob with the recorded experts less that with the live ones


class LayerLoad(TypedDict):
    """The load of the experts of a layer."""

    layer: int
    load: float  # tokens of the fullest expert over the mean of the layer, mean over the updates
    fullest: int  # the expert with most tokens of the run
    share: float  # of the choices of the run, those of this expert
    dead: int  # experts that no token of the last update reached


class DeadExpert(TypedDict):
    """An expert that no token of the last update reached."""

    layer: int
    expert: int
    since: int  # the first of the last updates without a token
    updates: int  # without a token, of all updates


class AgeLoad(TypedDict):
    """The load of the experts from the trained tokens of a range of ages, by the engines' record."""

    age: str
    tokens: int
    load: float  # tokens of the fullest expert over the mean of the layer, mean over the layers
    moved: float  # share of choices that go to other experts than those of all tokens of the same updates
    by_chance: float  # the same for independent tokens drawn at random


class Experts(TypedDict):
    """Routing of a model with experts, over the updates."""

    load: float | None  # tokens of the fullest expert of a layer over the mean of the layer
    dead: Ends  # experts of all layers that no token of the update reached
    recorded: float | None  # share of the trained tokens with a record
    prompts_differ: int  # answers whose prompt has another record than in the first answer of the group
    routes: list[RouteRow]
    layers: list[LayerLoad]  # the rest is [] for a run that did not write expert_loads.jsonl
    dead_experts: list[DeadExpert]
    ages: list[AgeLoad]


class CodeVerdicts(TypedDict):
    """Verdicts on answers that are code."""

    labels: Mapping[str, ShareOfAnswers]  # share of the scored answers; labels that no answer got are left out
    cpu_seconds: float | None  # of a check, mean
    wall_seconds: float | None  # of a check, mean
    waiting: float | None  # answers that waited for a worker when one came, mean
    visible_only: BeforeAfter  # evaluations: share of the passing answers that fails a hidden test


class SourceMeasures(TypedDict):
    """Metrics of a source over the updates."""

    equal_rewards: float | None  # share of its groups in the batches without a signal; None if it has none
    reward: Ends  # of the updates that have a group of it
    answer_tokens_mean: float | None  # generated tokens of an answer


class SourceRow(SourceMeasures):
    """One source of a mixture (task.sources)."""

    source: str
    drawn: int  # groups
    drawn_share: float  # of the draws of all sources
    trained: int  # groups that a batch took
    dropped: Mapping[str, int]  # groups by reason
    filtered_rate: float | None  # share of its finished groups that task.filter dropped; None if it dropped none
    token_share: float | None  # of the tokens that the filter of equal rewards left in the batches
    accuracy: Accuracy | None  # on its held-out problems; None without an evaluation


class Told(TypedDict):
    """What the report has as the run told it: fields of telemetry.facts.RunFacts with their names."""

    config: str  # path of the experiment file
    seed: int
    eta: float | None  # None: unbounded, or not used by the schedule
    schedule: str
    clock: str
    objective: str  # method and combination; '' of a run of an earlier version
    ends: Mapping[str, str]  # texts of the tokens that end an answer, by their ids; empty: none, or not known yet
    simulation: str  # chips, model and lengths of a simulation; '' = a real run
    planned_steps: int | None
    finished: bool
    missing: list[str]  # missing parts of the report of an unfinished run, in words
    newest_checkpoint: int | None  # of an unfinished run: its update; None without one
    problems: Mapping[str, int]  # 'train', 'held_out', 'dropped'
    sandbox: SandboxRecord | None  # sandbox in which a scorer or tools ran code; None if the config asks for none
    kv_cache_bytes: int | None  # of one engine; None if it is unknown
    memory_parts: Mapping[str, int]  # bytes by purpose; empty if they are unknown
    compilations: int  # after warm-up
    peak_memory_bytes: int | None  # of the process tree
    weights_sha256: str | None  # of the last version
    git_commit: str | None
    revisions: Mapping[str, str]  # commits of models and data sets of the Hub, by config field
    versions: Mapping[str, str]  # of packages
    idle_fields: list[str]
    prolonged: list[dict[str, int]]
    hook: Mapping[str, object]  # telemetry.row_thread.RowFacts; empty without one
    tracker: Mapping[str, object]  # RowFacts of telemetry.tracker
    hardware: Mapping[str, object]
    devices: Mapping[str, Sequence[int] | Mapping[str, Sequence[int]]]  # ids by user


class Report(Told):
    """The content of report.json."""

    steps: int  # updates published
    running: bool  # it has not finished, and a process uses its workdir
    attempts: int  # starts of the program in the log
    wall_seconds: float | None
    groups: Groups
    tokens: Tokens
    optimizer_steps: OptimizerSteps
    reward: Ends
    unparsed_rate: ShareOfAnswers  # share of a batch's answers in which no answer could be read
    audit: Audit | None  # None if no answer was compared a second time
    code: CodeVerdicts | None  # None if no answer was code
    accuracy: Accuracy | None
    most_frequent_answer_share: BeforeAfter
    evaluation_curve: list[CurveRow]  # by version
    evaluation_curve_ends: CurveEnds | None  # None without such evaluations
    evaluation_lane_share: float | None  # of the busy seconds of the engines' lanes; None without such evaluations
    evaluation_cache_bytes: int | None  # of the slots for them, over all engines
    token_age: MeanMax  # of the trained tokens, in versions
    token_age_steps: StepAge  # of the trained tokens
    token_age_histograms: AgeHistograms
    versions_per_trajectory: MeanMax
    interruptions: int  # times that new weights met unfinished requests on an engine
    steps_with_interruption: int
    admission_held: Mapping[str, float]  # share of the window in which each bound kept admission closed
    idle_slots: Mapping[str, float]  # share of the slots' seconds without an open answer, by that bound
    publish_pause_seconds: MedianMax  # of an engine
    request_pause_seconds: MedianMax  # of an interrupted request, from the swap to its next token
    publications: list[PublicationRow]  # of versions above 0
    agents: AgentSummary | None  # None without agents
    engine_work: EngineWork
    sources: NotRequired[list[SourceRow]]  # absent for a run of one task
    engine_classes: NotRequired[list[ClassRow]]  # absent if all engines have equal hardware
    attention_positions: AttentionPositions | None  # None if the log does not have them
    preemptions: Preemptions | None  # None without any
    servers: list[ServerRow]  # empty if engines were in the process of the run
    token_fates: TokenFates | None  # this and the next: None if an earlier program wrote a part of the run
    censoring: Censoring | None
    mismatch: Mismatch
    ratios_by_age: list[AgeRow]
    ratio_split: RatioSplit | None  # None if it was not measured
    experts: Experts | None  # None for a model without experts
    throughput: Throughput
    energy: EnergySummary | None  # None: telemetry.energy='off'
    busy: Busy
    time: Time
    event_loop_lag_seconds: Lag
    window_seconds: float
    cause_of_gap: str
    warnings: list[str]
