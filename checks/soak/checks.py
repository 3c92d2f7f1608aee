"""What must hold of the answers, the event log and the memory of a soak."""

from __future__ import annotations

import collections
import itertools
import json
import pathlib
import queue
import statistics
import threading
from collections.abc import Iterable, Mapping, Sequence

from checks.soak.load import Answered
from checks.soak.scores import Scores

ONE_IN = 4  # of the answers of one version are scored, of the others all
MOST_MEGABYTES = 1.0  # a minute
WINDOW_S = 30.0
MEGABYTE = 1e6
Sample = tuple[float, float]  # (seconds, bytes)


class AnswerCheck:
    """Scores answers on a thread of its own; a context manager, whose end scores the rest."""

    def __init__(self, answered: queue.SimpleQueue[Answered], dtype: str):
        self._answered, self._dtype = answered, dtype
        self.faults: list[str] = []
        self.scored = self.of_versions = 0  # answers; those of several versions
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name='scores', daemon=True)

    def __enter__(self) -> AnswerCheck:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        scores = Scores(self._dtype)
        while not self._end.is_set() or not self._answered.empty():
            try:
                self._check(scores, self._answered.get(timeout=0.5))
            except queue.Empty:
                continue

    def _check(self, scores: Scores, answer: Answered) -> None:
        tokens = sum(len(segment.tokens) for segment in answer.segments)
        if tokens != answer.asked_tokens:
            self.faults.append(f'draw {answer.draw}: {tokens} tokens, and {answer.asked_tokens} were asked for')
        versions = {segment.policy_version for segment in answer.segments}
        if len(versions) > 1 or answer.draw % ONE_IN == 0:
            self.scored += 1
            self.of_versions += len(versions) > 1
            if fault := scores.fault(answer.prompt, answer.segments):
                self.faults.append(f'draw {answer.draw}: {fault}')


def check_events(path: pathlib.Path, started: int) -> list[str]:
    """Faults of the ledger in the event log: every draw ended once, with all of its tokens."""
    ends: collections.Counter[int] = collections.Counter()
    received: dict[int, int] = {}  # tokens of a draw that had arrived when it last moved
    faults = []
    for event in read_events(path):
        if event['kind'] == 'move':
            draw = int(str(event['request']).split('/')[1])
            if event['tokens'] < received.get(draw, 0):
                faults.append(f'draw {draw} had {received[draw]} tokens, and {event["tokens"]} later')
            received[draw] = event['tokens']
        elif event['kind'] == 'finish':
            ends[event['draw']] += 1
            if event['tokens'] < received.get(event['draw'], 0):
                faults.append(f'draw {event["draw"]} ended with fewer tokens than it had')
    faults += [f'draw {draw} ended {count} times' for draw, count in ends.items() if count > 1]
    if missing := sorted(set(range(started)) - set(ends)):
        faults.append(f'{len(missing)} draws never ended, the first: {missing[:5]}')
    return faults


def find_quarantines(path: pathlib.Path) -> list[str]:
    """Each server that was taken for a wrong one, with the reason."""
    return [
        f'{event["engine"]} at {event["time"]:.1f} s: {event["reason"]}'
        for event in read_events(path)
        if event['kind'] == 'engine_state' and event['state'] == 'quarantined'
    ]


def slope(points: Sequence[Sample]) -> float | None:
    """Theil and Sen's: the median of the slopes of all pairs, in bytes a second; None for fewer than two points."""
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2) if b[0] != a[0]]
    return statistics.median(slopes) if slopes else None


def window_medians(samples: Sequence[Sample], window_s: float = WINDOW_S) -> list[Sample]:
    """(middle of a window, median of its bytes) by time."""
    windows: dict[int, list[float]] = collections.defaultdict(list)
    for time_s, size in samples:
        windows[int(time_s // window_s)].append(size)
    return [((index + 0.5) * window_s, statistics.median(sizes)) for index, sizes in sorted(windows.items())]


class MemoryTrack:
    """Samples of processes by name; a process that was started again is another one."""

    def __init__(self) -> None:
        self._samples: dict[str, list[Sample]] = {}

    def add(self, name: str, time_s: float, size: float) -> None:
        self._samples.setdefault(name, []).append((time_s, size))

    def megabytes_a_minute(self, from_s: float, window_s: float = WINDOW_S) -> dict[str, float | None]:
        """Of the processes that lived at the end, over their samples from then on; None: too few windows."""
        end_s = max((samples[-1][0] for samples in self._samples.values()), default=0.0)
        alive = {name: samples for name, samples in self._samples.items() if samples[-1][0] > end_s - 2 * WINDOW_S}
        found: dict[str, float | None] = {}
        for name, samples in alive.items():
            per_s = slope(window_medians([one for one in samples if one[0] >= from_s], window_s))
            found[name] = None if per_s is None else 60 * per_s / MEGABYTE
        return found


def check_memory(slopes: Mapping[str, float | None], servers: int) -> list[str]:
    """What speaks against the memory of the servers that lived at the end; `slopes` in megabytes a minute."""
    known = {name: value for name, value in slopes.items() if value is not None}
    found = [f'{name} grows by {value:.2f} MB a minute' for name, value in known.items() if not value <= MOST_MEGABYTES]
    if len(known) < servers:
        found.append(f'the memory of {len(known)} servers was measured, not of {servers}')
    return found


def check_shared(most_bytes: int, segment_bytes: int) -> list[str]:
    """A reader may have two segments open, of a sender that died and of its successor."""
    if most_bytes <= 2 * segment_bytes:
        return []
    return [
        f'a server shares {most_bytes / 1e6:.1f} MB, and a segment has {segment_bytes / 1e6:.1f} MB: it keeps old ones'
    ]


def check_seconds(slowest_s: Mapping[str, float], most_s: float) -> list[str]:
    """What hung, by kind."""
    return [f'the slowest {kind} took {seconds:.0f} s' for kind, seconds in slowest_s.items() if not seconds <= most_s]


def check_seen(counts: Mapping[str, int], wanted: Sequence[str]) -> list[str]:
    """Kinds of work, faults and abuse that never happened: nothing is known of them."""
    return [f'never happened: {name}' for name in wanted if not counts.get(name)]


def count_events(path: pathlib.Path) -> dict[str, int]:
    """By kind, and for states of engines by state."""
    counts: collections.Counter[str] = collections.Counter()
    for event in read_events(path):
        counts[event['kind']] += 1
        if event['kind'] == 'engine_state':
            counts[f'engine_state {event["state"]}'] += 1
    return dict(sorted(counts.items()))


def read_events(path: pathlib.Path) -> Iterable[Mapping]:
    with path.open() as lines:
        for line in lines:
            yield json.loads(line)
