"""What a run needs of its engines. The pool refuses an engine that lacks it when it is built, before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from areal_jax.errors import UserError
from areal_jax.protocols import RolloutEngine
from areal_jax.types import EngineCapabilities, KvPolicy, LogprobKind


class EngineError(UserError, ValueError):
    """An engine lacks what the run needs; the message names both and the setting that needs it."""


@dataclasses.dataclass(frozen=True)
class Requirement:
    """One thing that every engine must be able to do."""

    setting: str  # of the config, with its value: 'evaluation.every=8'
    what: str  # the thing, after "cannot": 'keep the weights of a version'
    holds: Callable[[EngineCapabilities], bool]


def needs_logprobs(setting: str, kind: LogprobKind) -> Requirement:
    return Requirement(setting, f'give log-probs of kind {kind!r}', lambda can: kind in can.logprobs)


def needs_update(setting: str, policy: KvPolicy) -> Requirement:
    return Requirement(setting, f'do {policy!r} with unfinished answers at a swap', lambda can: policy in can.update)


def needs_spans(setting: str) -> Requirement:
    return Requirement(setting, 'tell the version of each token after a swap', lambda can: can.spans)


def needs_pause(setting: str) -> Requirement:
    """A pause that keeps what was generated."""
    return Requirement(
        setting, 'pause without aborting answers', lambda can: bool({'retract', 'in_place'} & {*can.pause_modes})
    )


def needs_pinned(setting: str) -> Requirement:
    return Requirement(setting, 'keep the weights of an earlier version for an evaluation', lambda can: can.pinned)


def require_capabilities(engines: Iterable[RolloutEngine], requirements: Sequence[Requirement]) -> None:
    """Raises EngineError for the first engine that lacks what the run needs."""
    for engine in engines:
        for requirement in requirements:
            if not requirement.holds(engine.capabilities):
                raise EngineError(
                    f'{engine.name} cannot {requirement.what}, which {requirement.setting} needs: change that setting '
                    'or use other engines'
                )
