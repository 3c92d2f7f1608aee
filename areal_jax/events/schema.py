"""The schema of the event log: its file, its lanes, and the kinds of events with their fields.

The log is one JSON object a line. control/event_writer.py and report/event_log.py refuse an event that is not declared
here; docs/events.md is this table as a page. An addition raises VERSION. What is declared is never changed.
"""

import types
import typing
from collections.abc import Mapping
from typing import Annotated, Literal, NotRequired

from areal_jax import files
from areal_jax.events import records
from areal_jax.events.schema import (
    Amount,
    AuditEvent,
    Check,
    CheckEvent,
    Draw,
    Engine,
    EngineStateEvent,
    EvaluationReceiveEvent,
    FenceEvent,
    FinishEvent,
    FrictionEvent,
    Header,
    MoveEvent,
    Pause,
    PolicyVersion,
    ProbeEvent,
    ReallocateEvent,
    ReceiveEvent,
    RegisterEvent,
    Request,
    RewardEvent,
    RunNumber,
    Sample,
    SpareEvent,
    StageEvent,
    Update,
    WorkKind,
)

FILE = 'events.jsonl'  # in the workdir
# 13: `reallocate` without needed engines, engines do not tell their hardware, none is left out; 12: devices stay, no
# simulations; 10: no episodes of several rows; 9: no frictions; 8: no size of a version; 7: no rewards of a buffered
# group, a prefill does not tell prompts and answers; 6: no servers set aside for evaluation; 5: no lengths of segments,
# nothing for a replay; 4: no engines in other processes; 3: no `preempt`, no rebuilt positions; 2: no evaluation beside
# training, no `audit`; 1: no `log`
VERSION = 14


class LogEvent(Header):
    """The program started to write; the first event of each start."""

    kind: Literal['log']
    version: Annotated[int, 'version of the schema (events.VERSION)']


class DrawEvent(Header):
    """A prompt was taken from the stream."""

    kind: Literal['draw']
    draw: Draw


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
