"""In which phase a run is, as its files say it; pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tests.chaos_roles.plan import PROCESSES, Strike
from tests.chaos_roles.state import Event, State


def engine_of(process: str) -> str:
    """'engine-1' in the registry is 'engine/1' in the log."""
    return process.replace('-', '/')


_LATEST = 0.7  # of the updates: later there may be no further save
_ENGINES = tuple(map(engine_of, PROCESSES['engine']))


def has_begun(events: Sequence[Event]) -> bool:
    """Whether the controller that runs now has asked for an answer."""
    for event in reversed(events):
        if event['kind'] == 'route':
            return True
        if event['kind'] == 'log':  # the first event of each start
            return False
    return False


def is_serving(engine: str, events: Sequence[Event]) -> bool:
    for event in reversed(events):
        if event['kind'] == 'engine_state' and event['engine'] == engine:
            return bool(event['state'] == 'serving')
        if event['kind'] == 'log':
            return False
    return False


def is_starting(strike: Strike, state: State) -> bool:
    """The process was started and has not yet done anything for the run."""
    if not state.starts.get(strike.process) or has_begun(state.events):
        return False
    return strike.cell.role != 'engine' or not is_serving(engine_of(strike.process), state.events)


def is_staging(strike: Strike, state: State) -> bool:
    """A version is being written by the learner processes, or is being fetched by the engine that is to be struck."""
    if strike.cell.role == 'engine':
        return _stages(engine_of(strike.process), state.events)
    return state.is_writing_version and _is_transferring(state.events)


def is_swapping(strike: Strike, state: State) -> bool:
    """An engine, which is the one to be struck if one is, has fetched a version and has not said that it uses it."""
    struck = (engine_of(strike.process),) if strike.cell.role == 'engine' else _ENGINES
    return any(_swaps(engine, state.events) for engine in struck)


def is_saving(strike: Strike, state: State) -> bool:
    return state.is_writing_checkpoint


def is_ending(state: State, steps: int) -> bool:
    """The last version is published: the evaluation, the last checkpoint, the report and the export are left."""
    return _last_version(state) == steps


def _last_version(state: State) -> int:
    return next((int(event['version']) for event in reversed(state.events) if event['kind'] == 'publish'), 0)


def in_phase(strike: Strike, state: State, steps: int) -> bool:
    """Whether now is the time for the strike; the strikes of start-up and end come some time after it has begun."""
    if strike.cell.phase == 'start-up':
        return is_starting(strike, state)
    if strike.cell.phase == 'end':
        return is_ending(state, steps)
    return _last_version(state) >= int(_LATEST * strike.fraction * steps) and _IN_LOOP[strike.cell.phase](strike, state)


_IN_LOOP: Mapping[str, Callable[[Strike, State], bool]] = {
    'staging': is_staging, 'swap': is_swapping, 'save': is_saving,
}  # fmt: skip


def _is_transferring(events: Sequence[Event]) -> bool:
    for event in reversed(events):
        if event['kind'] in ('run_start', 'run_done') and event['work'] == 'publish':
            return bool(event['kind'] == 'run_start')
        if event['kind'] == 'log':
            return False
    return False


def _stages(engine: str, events: Sequence[Event]) -> bool:
    """A version is published, and the engine has not yet fetched it."""
    for event in reversed(events):
        if event['kind'] == 'publish':
            return is_serving(engine, events)
        if event['kind'] == 'log' or (event['kind'] == 'stage' and event['engine'] == engine):
            return False
    return False


def _swaps(engine: str, events: Sequence[Event]) -> bool:
    for event in reversed(events):
        if event['kind'] == 'log':
            return False
        if event.get('engine') == engine and event['kind'] in ('stage', 'load', 'engine_state', 'leave'):
            return bool(event['kind'] == 'stage' and event['phase'] != 'acknowledge' and event['outcome'] == 'done')
    return False
