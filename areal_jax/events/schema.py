"""The schema of the event log: its file, its lanes, and the kinds of events with their fields.

The log is one JSON object a line. control/event_writer.py and report/event_log.py refuse an event that is not declared
here; docs/events.md is this table as a page. An addition raises VERSION. What is declared is never changed.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Annotated, Literal, NotRequired, TypedDict

from areal_jax import files
from areal_jax.events import records

Draw = Annotated[int, 'number of the draw: the position of the prompt in the stream, unique in the run']
Sample = Annotated[int, 'index of the answer in its group, from 0']
Request = Annotated[str, 'SEED/DRAW/SAMPLE']
Engine = Annotated[str, 'name of the engine']
Update = Annotated[int, 'number of the update, from 1; the policy version that it makes']
PolicyVersion = Annotated[int, 'policy version; 0 are the weights that the run starts from']
RunNumber = Annotated[int, 'number of the run on a lane, in the order of requests, unique in the log since version 2']
WorkKind = Annotated[
    str,
    'kind of work: decode, prefill, train, snapshot, publish, load, reward, save; beside training evaluation_decode, '
    'evaluation_prefill, pin; with a server of others generate and control; of agents tool; of another split of the '
    'devices compile and reshard',
]
Check = Annotated[
    int, 'CRC-32 of the other fields as JSON with sorted keys; of the real clock, from version 6 of the log on'
]
Pause = Annotated[float, 'clock seconds without decoding, the rebuild of KV caches before the next dispatch included']
Amount = Annotated[float, 'amount of work in the unit of its kind: tokens, steps, calls']


class Header(TypedDict):
    """What every event has."""

    seq: Annotated[int, 'number of the event, from 0, without gaps; a resumed run goes on from its checkpoint']
    time: Annotated[float, 'clock seconds: when the clock released the last completion']
    lane: Annotated[str | None, 'lane or engine that the event belongs to; null for the loop itself']


# The event of a friction (section `friction` of the config): a part of the schema.


class FrictionEvent(Header):
    """An answer, what is reported of it, or its reward was changed on purpose."""

    kind: Literal['friction']
    draw: Draw
    sample: Sample
    friction: Annotated[
        str, 'constant, logprobs, temperature: of the actor, before `finish`; unrewarded, reward: before `consume`'
    ]
    before: Annotated[
        list[float],
        'reported log-probs of the generated tokens (temperature: of the distribution that was sampled), or the reward',
    ]
    after: Annotated[list[float], 'the same as the learner gets it']
    tokens: NotRequired[Annotated[list[int], 'constant: the tokens that were generated']]


# Events of devices that go from one part of a run to another.


class ReallocateEvent(Header):
    """Devices went from generation to training, or back, before an update; seconds are of the clock."""

    kind: Literal['reallocate']
    update: Annotated[int, 'number of the first update with the new split']
    from_learner: Annotated[str, 'cluster.learner before']
    from_engines: Annotated[str, 'cluster.engines before']
    learner: Annotated[str, 'cluster.learner from now on']
    engines: Annotated[str, 'cluster.engines from now on']
    left: Annotated[list[str], 'engines that left']
    joined: Annotated[list[str], 'engines that joined']
    moved: Annotated[int, 'requests that went on elsewhere']
    busy_learner: Annotated[float, 'seconds of an update in which the learner was busy, mean since the move before']
    busy_engines: Annotated[float, 'likewise, of one engine']
    needed_engines: NotRequired[
        Annotated[
            float,
            'likewise, that one engine needs for what an update takes, as `auto` counts; from version 14 of the log on',
        ]
    ]
    period: Annotated[float, 'likewise, seconds of an update']
    wait_seconds: Annotated[float, 'for the publication of the update before, and for programs not yet compiled']
    leave_seconds: Annotated[float, 'for dispatches of the engines that left']
    learner_seconds: Annotated[float, 'in which weights and optimizer state moved']
    join_seconds: Annotated[float, 'in which the engines that joined were built']
    seconds: Annotated[float, 'of the whole move, in which nothing trains; engines that stay go on']


# Events of engines of one class, which differ from the others in their hardware.


class SpareEvent(Header):
    """The engines of a class get no new requests from now on, or get them again; from version 14 of the log on."""

    kind: Literal['spare']
    mode: Annotated[Literal['start', 'done'], 'which end of it']
    hardware: Annotated[str, 'of the class, as `join` tells it']
    engines: Annotated[list[str], 'of the class']
    version: PolicyVersion
    open: Annotated[float, 'open answers of the whole pool, mean since the publication before']
    slots: Annotated[int, 'decoding slots of the engines that get requests without the class']
    speed: Annotated[float, 'tokens a second of an open answer on the class, as a share of the fastest class']
    update_seconds: Annotated[float, 'between two publications, mean of the last ones']
    reason: Annotated[str, 'fits: the slots of the others held all answers; full, slower: they do not, or no longer']


# The kinds of events of engines that are servers in other processes: a part of the schema.


class RegisterEvent(Header):
    """The pool learned of an engine in another process."""

    kind: Literal['register']
    engine: Engine
    incarnation: Annotated[int, 'counts the starts of the engine of this name, from 1']
    url: Annotated[str, 'where it serves']


class EngineStateEvent(Header):
    """An engine in another process changed its state in the pool."""

    kind: Literal['engine_state']
    engine: Engine
    state: Annotated[
        str,
        'registered, syncing (weights are on their way), probing, serving, draining (gets no further requests), '
        'unknown (it does not answer, or may hold either of two versions), quarantined (what it said was wrong), gone, '
        'refused (the run cannot use it; `engine` is its name in the registry); '
        'only a serving one gets requests',
    ]
    reason: Annotated[str, 'why']


class StageEvent(Header):
    """A part of the commit of a version on an engine in another process ended; `load` tells that it is complete."""

    kind: Literal['stage']
    engine: Engine
    version: PolicyVersion
    phase: Annotated[Literal['stage', 'swap', 'acknowledge'], 'which part']
    outcome: Annotated[Literal['done', 'refused', 'unknown'], 'how it ended']
    seconds: Annotated[float, 'clock seconds that it took']


class ProbeEvent(Header):
    """The answer of an engine to a probe was compared with the log-probs of the learner."""

    kind: Literal['probe']
    engine: Engine
    version: PolicyVersion
    outcome: Annotated[Literal['passed', 'failed', 'undecided'], 'undecided: the learner has other weights by now']
    detail: Annotated[str, 'what was found']


class MoveEvent(Header):
    """A request goes on elsewhere, with the output received so far as its prefix."""

    kind: Literal['move']
    request: Request
    from_engine: Annotated[str, 'engine that it leaves']
    tokens: Annotated[int, 'tokens of the answer received so far; none is lost']
    attempt: Annotated[int, 'how often it was given up by an engine that failed; 0 where none did']
    reason: Annotated[str, 'why']


class FenceEvent(Header):
    """Whatever an engine still does with earlier requests was ended, before it gets others."""

    kind: Literal['fence']
    engine: Engine


class _Receive(Header):
    engine: Engine
    request: Request
    tokens: Annotated[int, 'tokens that it brought']


class ReceiveEvent(_Receive):
    """A call for tokens ended, with the answer or with a part of it."""

    kind: Literal['receive']


class EvaluationReceiveEvent(_Receive):
    """As `receive`, for an evaluation beside training, from a server set aside for it (evaluation.engines)."""

    kind: Literal['evaluation_receive']


# Events of an episode: its end, and what the verifier says of it.


class FinishEvent(Header):
    """An answer, an episode with all of its rows, was generated to its end."""

    kind: Literal['finish']
    draw: Draw
    sample: Sample
    tokens: Annotated[int, 'tokens of the answer']
    reason: Annotated[
        str,
        'why it ended: stop, length, cancelled; lost: no engine finished it; of an agent also turns, deadline, '
        'agent_error, env_error',
    ]
    versions: Annotated[list[int], 'policy version of each segment']
    lengths: NotRequired[Annotated[list[int], 'tokens of each segment; from version 6 of the log on']]
    turns: NotRequired[Annotated[int, 'of an agent: turns that its program got']]
    rows: NotRequired[Annotated[list[int], 'segments of each row of the episode; one row where it is left out']]
    discarded: NotRequired[Annotated[list[list[int]], '[policy version, tokens] that were taken out of rows again']]
    counts: NotRequired[
        Annotated[list[list[str | int]], 'of an agent: [what its program did, how often], see docs/agents.md']
    ]
    routes: NotRequired[
        Annotated[str, 'sha256, 16 digits, of the experts that prompt and answer have reached, where they are recorded']
    ]
    forks: NotRequired[Annotated[list[str], 'why each row after the first one began']]


class RewardEvent(Header):
    """The verifier judged an answer."""

    kind: Literal['reward']
    draw: Draw
    sample: Sample
    value: Annotated[float, 'the reward; 0 where no attempt gave one']
    label: Annotated[
        str,
        'ok; unparsed: no answer could be read; of code what the answer did; or why there is no reward: timeout, '
        'crash, sandbox, error',
    ]
    attempts: Annotated[int, 'attempts at verification, from 1']


class CheckEvent(Header):
    """The answer was code: what its check took."""

    kind: Literal['check']
    draw: Draw
    sample: Sample
    cpu_s: Annotated[float, 'CPU seconds of the processes of the check; 0: the answer had no code']
    wall_s: Annotated[float, 'wall seconds']
    waiting: Annotated[int, 'answers that waited for a worker when this one came']


class AuditEvent(Header):
    """A scored answer was compared with the gold a second time, in another way."""

    kind: Literal['audit']
    draw: Draw
    sample: Sample
    outcome: Annotated[str, 'agrees or disagrees with the reward; undecided: it cannot tell whether they differ']


FILE = 'events.jsonl'  # in the workdir
# 14: no mixtures; 13: `reallocate` without needed engines, engines do not tell their hardware, none is left out; 12:
# devices stay, no simulations; 10: no episodes of several rows; 9: no frictions; 8: no size of a version; 7: no rewards
# of a buffered group, a prefill does not tell prompts and answers; 6: no servers set aside for evaluation; 5: no
# lengths of segments, nothing for a replay; 4: no engines in other processes; 3: no `preempt`, no rebuilt positions;
# 2: no evaluation beside training, no `audit`; 1: no `log`
VERSION = 15


class LogEvent(Header):
    """The program started to write; the first event of each start."""

    kind: Literal['log']
    version: Annotated[int, 'version of the schema (events.VERSION)']


class DrawEvent(Header):
    """A prompt was taken from the stream."""

    kind: Literal['draw']
    draw: Draw
    source: NotRequired[Annotated[str, 'name of the source of a mixture (task.sources); from version 15 of the log on']]


class AdmitEvent(Header):
    """The group of a draw was admitted: its answers are requested."""

    kind: Literal['admit']
    draw: Draw
    open: NotRequired[Annotated[int, 'with rollout.max_running_groups=0: answers that were open before it']]
    wanted: NotRequired[Annotated[int, 'likewise: open answers from which on no group is admitted']]


class RouteEvent(Header):
    """The pool chose the engine of a request."""

    kind: Literal['route']
    request: Request
    draw: Draw
    sample: Sample
    engine: Engine


class ArriveEvent(Header):
    """An engine queued a request."""

    kind: Literal['arrive']
    request: Request


class _Prefill(Header):
    engine: Engine
    requests: Annotated[list[str], 'requests that get a slot; from version 4 on also those whose tokens are computed']
    bucket: Annotated[int, 'padded length in tokens: of the packed row, before version 4 of a sequence']
    tokens: Annotated[int, 'tokens computed, without padding and without prefixes that were kept']
    prior: NotRequired[Annotated[int, 'padded number of earlier positions read from the KV cache']]
    rebuilt: NotRequired[Annotated[int, 'part of `tokens`: computed again for interrupted or preempted answers']]
    prompt_tokens: NotRequired[
        Annotated[int, 'part of `tokens`: of prompts, for all answers to one; from version 8 of the log on']
    ]
    kept: NotRequired[
        Annotated[list[int], 'tokens of prompts that the cache had of sequences before: of new answers, of others']
    ]


class PrefillEvent(_Prefill):
    """An engine requested the prefill of prompts or of interrupted answers."""

    kind: Literal['prefill']


class _Decode(Header):
    engine: Engine
    dispatch: Annotated[int, 'number of the dispatch, from 1 at each start of the program']
    slots: Annotated[list[str | None], 'request decoded in each slot; null for none']
    bucket: Annotated[int, 'rows of the batch, padding included; before version 4 tokens of the KV cache attended to']
    steps: Annotated[int, 'tokens per slot at most']
    tokens: Annotated[int, 'tokens generated over all slots']
    version: PolicyVersion
    positions: NotRequired[Annotated[int, 'positions of the KV cache that rows see, over rows and steps']]
    positions_read: NotRequired[Annotated[int, 'the same with those that attention reads and masks']]
    discarded: NotRequired[Annotated[int, 'part of `tokens`: of requests cancelled meanwhile; absent for none']]


class DecodeEvent(_Decode):
    """A dispatch of decoding was done."""

    kind: Literal['decode']


class PreemptEvent(Header):
    """A request gave up its slot and its part of the KV cache, which was full; it is computed again later."""

    kind: Literal['preempt']
    request: Request
    engine: Engine
    tokens: Annotated[int, 'tokens of prompt and answer so far; none is lost']


class InterruptEvent(Header):
    """New weights met unfinished answers on an engine."""

    kind: Literal['interrupt']
    engine: Engine
    requests: Annotated[list[str], 'requests whose answers are unfinished']
    from_version: PolicyVersion
    to_version: PolicyVersion


class LoadEvent(Header):
    """An engine decodes with new weights."""

    kind: Literal['load']
    engine: Engine
    version: PolicyVersion
    pause_seconds: Pause


class BufferEvent(Header):
    """A finished group entered the buffer."""

    kind: Literal['buffer']
    draw: Draw
    partial: Annotated[bool, 'whether an answer was left out because it could not be verified']
    rewards: NotRequired[Annotated[list[float], 'of its other answers, by sample; from version 8 of the log on']]


class ConsumeEvent(Header):
    """The batch of an update was formed."""

    kind: Literal['consume']
    update: Update
    draws: Annotated[list[int], 'draws of the groups, ascending']


class DropEvent(Header):
    """A group will not be trained."""

    kind: Literal['drop']
    draw: Draw
    reason: Annotated[str, 'over_age, verifier_failed, cancelled, equal_rewards, success_rate, engine_lost']
    detail: Annotated[str, 'further words on the reason, or empty']


class PublishEvent(Header):
    """The weights of an update were transferred; engines fetch them from now on."""

    kind: Literal['publish']
    version: PolicyVersion
    manifest: Annotated[str, 'hash of the manifest']
    bytes: NotRequired[Annotated[int, 'that were sent: of the weights, or of what changed; from version 9 on']]
    channel: NotRequired[Annotated[str, 'that carried it (publication.channel)']]
    record: NotRequired[Annotated[str, 'whole, or delta: what changed since the version before']]
    changed: NotRequired[Annotated[float, 'share of the elements with other bits than in the version before']]


class RunStartEvent(Header):
    """A lane took up work."""

    kind: Literal['run_start']
    run: RunNumber
    work: WorkKind
    amount: Amount
    update: NotRequired[Annotated[int, 'update that the work belongs to (train, snapshot, save)']]
    version: NotRequired[Annotated[int, 'policy version of the weights (decode, prefill, publish, load)']]
    draw: NotRequired[Annotated[int, 'draw of the answer (reward, tool)']]
    sample: NotRequired[Annotated[int, 'sample of the episode (tool)']]
    tool: NotRequired[Annotated[str, 'name of the tool (tool)']]
    attempt: NotRequired[Annotated[int, 'number of the attempt, from 1 (reward)']]
    worker: NotRequired[Annotated[Literal['start'], 'the work is the start of a worker process (reward)']]


class RunDoneEvent(Header):
    """A lane ended work, and the program has its result."""

    kind: Literal['run_done']
    run: RunNumber
    work: WorkKind
    amount: Amount
    started: Annotated[float, 'clock seconds at which the work began']
    seconds: Annotated[float, 'how long it took, on the clock']
    reply: NotRequired[
        Annotated[str, 'of a worker process or a tool, as JSON (reward, tool); from version 6 of the log on']
    ]
    failure: NotRequired[Annotated[str, 'type of the exception instead of a reply; from version 6 of the log on']]
    joined: NotRequired[Annotated[int, 'of a simulation: like pieces of work that this one is, where more than 1']]
    check: NotRequired[Check]


class DeadlineEvent(Header):
    """A wait ended at its deadline."""

    kind: Literal['deadline']
    wait: Annotated[str, 'name of the wait']
    check: NotRequired[Check]


class SignalEvent(Header):
    """The program got a signal."""

    kind: Literal['signal']
    name: Annotated[str, 'SIGTERM, SIGINT, SIGHUP']
    check: NotRequired[Check]


class SaveEvent(Header):
    """The state of the run was copied for a checkpoint, which the lane `disk` writes."""

    kind: Literal['save']
    update: Annotated[int, 'updates trained']


class RestoreEvent(Header):
    """The run goes on from a checkpoint."""

    kind: Literal['restore']
    update: Annotated[int, 'updates trained']


class EvaluateEvent(Header):
    """An evaluation began or ended."""

    kind: Literal['evaluate']
    phase: Annotated[str, "before or after training; 'alone': of a model that is only evaluated"]
    mode: Annotated[Literal['start', 'done'], 'which end of it']
    unverified: NotRequired[Annotated[list[str], 'of `done`: label of each answer that was counted as 0 unverified']]


class EvaluationSlotsEvent(Header):
    """An engine has slots of its own for evaluations beside training."""

    kind: Literal['evaluation_slots']
    engine: Engine
    slots: Annotated[int, 'answers that they decode at once']
    bytes: Annotated[int, 'of their KV cache and state']


class EvaluationStartEvent(Header):
    """An evaluation beside training began: every engine has pinned the weights of the version."""

    kind: Literal['evaluation_start']
    version: PolicyVersion
    answers: Annotated[int, 'answers that it asks for']


class EvaluationDoneEvent(Header):
    """An evaluation beside training has all its scores."""

    kind: Literal['evaluation_done']
    version: PolicyVersion
    unverified: Annotated[list[str], 'label of each answer that was counted as 0 unverified']


class EvaluationSkipEvent(Header):
    """A version that was due is not evaluated, because an earlier one still is."""

    kind: Literal['evaluation_skip']
    version: PolicyVersion
    under_way: Annotated[int, 'the version that is being evaluated']


class EvaluationLostEvent(Header):
    """No row of a version: its weights were gone when the run went on, or with the last server that had them."""

    kind: Literal['evaluation_lost']
    version: PolicyVersion


class EvaluationPrefillEvent(_Prefill):
    """As `prefill`, for an evaluation beside training."""

    kind: Literal['evaluation_prefill']


class EvaluationDecodeEvent(_Decode):
    """As `decode`, for an evaluation beside training; its dispatches have numbers of their own."""

    kind: Literal['evaluation_decode']


class JoinEvent(Header):
    """An engine joined the pool."""

    kind: Literal['join']
    engine: Engine
    version: NotRequired[Annotated[int, 'policy version of its weights; from version 2 of the log on']]
    devices: NotRequired[Annotated[list[str], 'the devices that it decodes on; from version 2 of the log on']]
    hardware: NotRequired[
        Annotated[str, "their number and kind, '2 x H100', where engines differ; from version 14 of the log on"]
    ]


class LeaveEvent(Header):
    """An engine left the pool."""

    kind: Literal['leave']
    engine: Engine
    reason: NotRequired[Annotated[str, 'why; from version 5 of the log on']]


class ErrorEvent(Header):
    """The run ends with an error."""

    kind: Literal['error']
    message: Annotated[str, 'type and message of the exception']


Event = (
    LogEvent | DrawEvent | AdmitEvent | RouteEvent | ArriveEvent | PrefillEvent | DecodeEvent | PreemptEvent
    | InterruptEvent | LoadEvent | FinishEvent | RewardEvent | CheckEvent | AuditEvent
    | BufferEvent | ConsumeEvent | DropEvent
    | PublishEvent | RunStartEvent | RunDoneEvent | DeadlineEvent | SignalEvent | SaveEvent | RestoreEvent
    | EvaluateEvent | EvaluationSlotsEvent | EvaluationStartEvent | EvaluationDoneEvent | EvaluationSkipEvent
    | EvaluationLostEvent | EvaluationPrefillEvent | EvaluationDecodeEvent | JoinEvent | LeaveEvent
    | RegisterEvent | EngineStateEvent | StageEvent | ProbeEvent | MoveEvent | FenceEvent | ReceiveEvent
    | EvaluationReceiveEvent | FrictionEvent | ReallocateEvent | SpareEvent | ErrorEvent
)  # fmt: skip

HEADER = records.describe_record(Header)
KINDS: Mapping[str, records.Record] = types.MappingProxyType(
    {
        typing.get_args(typing.get_type_hints(declaration)['kind'])[0]: records.describe_record(declaration)
        for declaration in typing.get_args(Event)
    }
)


def find_fault(event: Mapping[str, object]) -> str:
    """What keeps `event` from being one of the schema, as the end of a sentence ("has no 'draw'"); '' for nothing."""
    kind = event.get('kind')
    if isinstance(kind, str) and kind in KINDS:
        return KINDS[kind].find_fault(event)
    return HEADER.find_fault({name: event[name] for name in HEADER.allowed & event.keys()}) or (
        f'has the unknown kind {kind!r}' if 'kind' in event else "has no 'kind'"
    )


def require_known_version(event: Mapping[str, object], where: str) -> None:
    """Raises FileError, which begins with `where`, for the event `log` of a log that a later program wrote."""
    version = event.get('version')
    if event.get('kind') == 'log' and isinstance(version, int) and version > VERSION:
        raise files.FileError(
            f'{where} says that the event log has version {version}; this program reads versions 1 to {VERSION}: use '
            'the one that wrote the log'
        )
