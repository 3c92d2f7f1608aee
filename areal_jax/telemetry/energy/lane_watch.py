"""Which lanes were in which state, and how active decoding was, from the events of a run as they come."""

from __future__ import annotations

from collections.abc import Mapping

from areal_jax.events.schema import Event
from areal_jax.telemetry.energy.meters import DECODE, PREFILL, TRAIN, Occupation, decode_activity

# Work of a lane -> state. Copies of weights and compilations have no published watts: they count as idle.
STATE_OF: Mapping[str, str] = {
    'train': TRAIN,
    'prefill': PREFILL,
    'evaluation_prefill': PREFILL,
    'decode': DECODE,
    'evaluation_decode': DECODE,
}


class LaneWatch:
    """Occupations since the last `take`, those that go on included."""

    def __init__(self) -> None:
        self._running: dict[int, Occupation] = {}  # by run; `end` is not known yet
        self._ended: list[Occupation] = []
        self._active: dict[str, list[float]] = {}  # lane -> [Σ activity · steps, Σ steps] of its dispatches
        self.activity: dict[str, float] = {}  # of each lane at the last `take`

    def apply(self, event: Event) -> None:
        """One event of the log, in its order."""
        if event['kind'] == 'run_start' and event['work'] in STATE_OF:
            start = event['time']
            self._running[event['run']] = Occupation(event['lane'] or '', STATE_OF[event['work']], start, start)
        elif event['kind'] == 'run_done' and event['work'] in STATE_OF:
            self._running.pop(event['run'], None)
            begun = event['started']
            ended = Occupation(event['lane'] or '', STATE_OF[event['work']], begun, begun + event['seconds'])
            self._ended.append(ended)
        elif event['kind'] == 'decode' or event['kind'] == 'evaluation_decode':
            rows, steps = sum(request is not None for request in event['slots']), event['steps']
            sums = self._active.setdefault(event['engine'], [0.0, 0.0])
            sums[0] += decode_activity(rows) * steps
            sums[1] += steps

    def take(self, end: float) -> list[Occupation]:
        """The occupations up to `end`, and in `activity` the mean activity of the dispatches meanwhile.

        A lane that logged no dispatch meanwhile keeps the activity that it had. Work that goes on counts from its
        run_start on, although its lane may take it up some milliseconds later: that time is known when it has ended.
        """
        going_on = [Occupation(o.lane, o.state, o.start, end) for o in self._running.values()]
        taken = [*self._ended, *going_on]
        self._ended = [occupation for occupation in self._ended if occupation.end > end]
        self.activity |= {lane: total / steps for lane, (total, steps) in self._active.items() if steps}
        self._active = {}
        return taken
