"""The kinds of events of engines that are servers in other processes: a part of the schema, which is in schema.py."""

from typing import Annotated, Literal

from areal_jax.events.schema import Engine, Header, PolicyVersion, Request


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
