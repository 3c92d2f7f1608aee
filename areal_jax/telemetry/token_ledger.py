"""The token ledger: every token that an engine generated for training has exactly one fate.

Fed by the event log (generated tokens, fates of draws) and by the learner's metrics of each update (fates of the
batch's tokens). app/run/observer.py keeps a ledger during the run, report/ makes one from the files. Its work is per
event and per version of an answer, never per token.

    generated = trained + filtered + masked + unused + Σ dropped(reason) + unfinished

    trained     in the loss of an optimizer step that was applied
    filtered    of a group that its batch left out for equal rewards
    masked      kept out of the loss for their age
    unused      in the loss of a minibatch without an applied step, because the gradient was not finite
    dropped     of a group or an answer that left the loop, with the reason of its drop
    unfinished  no fate yet: being generated, verified, buffered, or in a batch that is not published

Tokens that are recomputed after an interruption are not generated again: the engines log them as rebuilt. Answers of
evaluations do not count.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypedDict

from areal_jax.events.schema import Event, FinishEvent, RewardEvent
from areal_jax.labels import SCORED
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import Line, Value, counts
from areal_jax.types import NOT_GENERATED, UNSCORED

Counts = collections.Counter[int]  # tokens, by policy version or by age

IN_BATCH: Mapping[str, names.Metric] = {  # fate of a token that reached a batch -> tokens by age, of the learner
    'trained': names.TRAINED_BY_AGE,
    'filtered': names.FILTERED_BY_AGE,
    'masked': names.MASKED_BY_AGE,
    'unused': names.UNUSED_BY_AGE,
}
DROPPED = 'dropped/'  # prefix of a fate; followed by the reason
UNFINISHED = 'unfinished'
GIVEN_UP = f'{DROPPED}given_up'  # received from a server, then given up by the pool and generated again elsewhere
UNVERSIONED = -2  # in place of a policy version: `receive` of a server does not tell the versions
UNKNOWN_AGE = -1  # of tokens without a version
FIRST_VERSION = 6  # of the event log; since then it has the lengths of segments
_PROBE_DRAW = 2**31 - 1  # of probes by the pool of servers: no draw of a run is that high
# reason of a finish without an answer -> reason of the drop
_LOST = {'cancelled': 'cancelled', 'lost': 'engine_lost', **{label: label for label in UNSCORED}}


class LedgerError(RuntimeError):
    """The ledger does not close: tokens were lost, or counted twice."""


class LedgerState(TypedDict):
    """A TokenLedger at one instant, JSON-able; keys are numbers as text."""

    generated: int
    open: dict[str, int]
    fates: dict[str, dict[str, int]]
    groups: dict[str, _GroupState]
    batches: dict[str, list[int]]
    trained_version: int
    from_servers: bool
    credits: dict[str, int]
    violations: list[str]


class _GroupState(TypedDict):
    answers: dict[str, dict[str, int]]
    failed: dict[str, str]
    received: dict[str, int]


@dataclasses.dataclass
class _Group:
    """A draw whose fate is open."""

    answers: dict[int, Counts] = dataclasses.field(
        default_factory=dict
    )  # answers that ended: sample -> tokens by policy version
    failed: dict[int, str] = dataclasses.field(default_factory=dict)  # sample -> reason of the drop
    received: Counts = dataclasses.field(default_factory=collections.Counter)  # of open answers of servers, by sample


class TokenLedger:
    """Counts tokens by fate and age, event by event. A token's age is its age when its fate was decided.

    Args:
      by_version: whether to keep `versions`, which grows with the run.
    """

    def __init__(self, *, by_version: bool = False):
        self.generated = 0
        self.fates: dict[str, Counts] = {}  # fate -> tokens by age
        self.versions: dict[str, Counts] | None = {} if by_version else None  # fate -> tokens by policy version
        self.violations: list[str] = []
        self._open: Counts = collections.Counter()  # generated tokens without a fate, by policy version
        self._groups: dict[int, _Group] = {}  # by draw
        self._batches: dict[int, list[int]] = {}  # update -> draws
        self._trained_version = 0  # updates that the learner has made
        self._from_servers = False
        self._credits: collections.Counter[str] = (
            collections.Counter()
        )  # DRAW/SAMPLE -> tokens counted before `receive`
        self._evaluating = False

    @property
    def unfinished(self) -> int:
        return sum(self._open.values())

    def tokens(self, fate: str) -> int:
        """The number of tokens that have met this fate."""
        return sum(self.fates.get(fate, {}).values())

    def apply(self, event: Event) -> None:
        """Takes the next event of the log."""
        if event['kind'] == 'evaluate':
            self._evaluating = event['mode'] == 'start'
        elif self._evaluating:
            return
        elif event['kind'] == 'decode':
            if self._from_servers:  # of a server; its tokens count at `receive`
                return
            self._generate(event['version'], event['tokens'])
            self._decide(f'{DROPPED}cancelled', {event['version']: event.get('discarded', 0)}, self._trained_version)
        elif event['kind'] in ('register', 'engine_state'):
            self._from_servers = True
        elif event['kind'] == 'receive':
            self._receive(event['request'], event['tokens'])
        elif event['kind'] == 'admit':
            self._groups[event['draw']] = _Group()
        elif event['kind'] == 'finish':
            self._end_answer(event)
        elif event['kind'] == 'reward':
            self._score(event)
        elif event['kind'] == 'buffer' and event['partial']:
            self._drop_failed(event['draw'])
        elif event['kind'] == 'drop':
            group = self._groups.pop(event['draw'], _Group())
            self._decide(f'{DROPPED}{event["reason"]}', _total(group), self._trained_version)
        elif event['kind'] == 'consume':
            self._batches[event['update']] = event['draws']
        elif event['kind'] == 'run_done' and event['work'] == 'train':
            self._trained_version += 1

    def note_update(self, update: int, metrics: Line) -> None:
        """Takes the metrics of a published update, which have the fates of its batch's tokens."""
        version = update - 1  # when the batch was formed: its tokens have age 0
        consumed: Counts = collections.Counter()
        for draw in self._batches.pop(update, ()):
            consumed += _total(self._groups.pop(draw, _Group()))
        reported: Counts = collections.Counter()
        for fate, name in IN_BATCH.items():
            tokens = {version - age: int(count) for age, count in enumerate(counts(metrics, name)) if count}
            self._decide(fate, tokens, version)
            reported.update(tokens)
        if consumed != reported:
            self._violate(
                f'update {update}: its groups have {_describe(consumed)} tokens by version, and the learner tells what '
                f'became of {_describe(reported)}'
            )

    def metrics(self) -> dict[str, Value]:
        """Tokens by fate since the start of the run."""
        dropped = {fate: self.tokens(fate) for fate in sorted(self.fates) if fate.startswith(DROPPED)}
        fates = {fate: self.tokens(fate) for fate in IN_BATCH} | dropped | {UNFINISHED: self.unfinished}
        return {names.LEDGER_GENERATED: self.generated, **{f'{names.LEDGER}{fate}': n for fate, n in fates.items()}}

    def require_closed(self, rest: Mapping[int, int]) -> None:
        """Raises LedgerError unless the tokens without a fate equal `rest`, by policy version.

        Args:
          rest: tokens of all groups still in the loop, at an instant when no engine decodes.
        """
        if self.violations:
            raise LedgerError(f'the token ledger does not close: {self.violations[0]}')
        found, wanted = self._open_versions(), {version: n for version, n in rest.items() if n}
        if self._from_servers:  # cut-off calls have not reported their tokens yet
            found = {UNVERSIONED: self.unfinished} if self.unfinished and not wanted else wanted
        if found != wanted:
            raise LedgerError(
                f'the token ledger does not close: {_describe(found)} tokens by version have no fate, and the loop '
                f'holds {_describe(wanted)}'
            )

    def unfinished_versions(self) -> Counts:
        """Tokens without a fate by policy version."""
        return collections.Counter(self._open_versions())

    def state(self) -> LedgerState:
        return {
            'generated': self.generated,
            'open': _as_text(self._open),
            'fates': {fate: _as_text(tokens) for fate, tokens in self.fates.items()},
            'groups': {str(draw): _group_state(group) for draw, group in self._groups.items()},
            'batches': {str(update): list(draws) for update, draws in self._batches.items()},
            'trained_version': self._trained_version,
            'from_servers': self._from_servers,
            'credits': dict(self._credits),
            'violations': list(self.violations),
        }

    def restore(self, state: LedgerState) -> None:
        """Continues from a state; `versions` starts empty."""
        self.generated, self._open = state['generated'], _as_counts(state['open'])
        self.fates = {fate: _as_counts(tokens) for fate, tokens in state['fates'].items()}
        self._groups = {int(draw): _read_group(group) for draw, group in state['groups'].items()}
        self._batches = {int(update): list(draws) for update, draws in state['batches'].items()}
        self._trained_version, self.violations = state['trained_version'], list(state['violations'])
        self._from_servers, self._credits = state['from_servers'], collections.Counter(state['credits'])

    def _generate(self, version: int, tokens: int) -> None:
        self.generated += tokens
        self._open[version] += tokens

    def _receive(self, request: str, tokens: int) -> None:
        """Counts the tokens of an ended call to a server. Tokens that the pool gave up show when the answer ends."""
        self._from_servers = True
        _, draw, sample, *_ = request.split('/')  # the row of an episode may follow
        if int(draw) == _PROBE_DRAW:
            return
        counted = min(tokens, self._credits[f'{draw}/{sample}'])
        self._credits -= collections.Counter({f'{draw}/{sample}': counted})
        self._generate(UNVERSIONED, tokens - counted)
        group = self._groups.get(int(draw))
        if group is None or int(sample) in group.answers:
            self._give_up(tokens - counted)
        else:
            group.received[int(sample)] += tokens - counted

    def _give_up(self, tokens: int) -> None:
        if tokens:
            self.fates.setdefault(GIVEN_UP, collections.Counter())[UNKNOWN_AGE] += tokens
            self._open[UNVERSIONED] -= tokens

    def _settle(self, event: FinishEvent, group: _Group, tokens: int) -> None:
        """Settles an ended answer of servers: surplus tokens are given up; missing ones come from an open call."""
        surplus = group.received.pop(event['sample'], 0) - tokens
        self._give_up(max(surplus, 0))
        if surplus < 0:
            self._generate(UNVERSIONED, -surplus)
            self._credits[f'{event["draw"]}/{event["sample"]}'] -= surplus

    def _end_answer(self, event: FinishEvent) -> None:
        tokens: Counts = collections.Counter()
        for version, length in zip(event['versions'], event.get('lengths', ()), strict=True):
            if version != NOT_GENERATED:
                tokens[version] += length
        group = self._groups.setdefault(event['draw'], _Group())
        group.answers[event['sample']] = tokens
        if self._from_servers:
            self._settle(event, group, sum(tokens.values()))
        else:
            self._decide(
                f'{DROPPED}diverged',
                _by_version(event.get('discarded', [])),
                self._trained_version,
            )
        if reason := _LOST.get(event['reason']):
            group.failed[event['sample']] = reason

    def _score(self, event: RewardEvent) -> None:
        if event['label'] not in SCORED:
            self._groups.setdefault(event['draw'], _Group()).failed[event['sample']] = 'verifier_failed'

    def _drop_failed(self, draw: int) -> None:
        """Drops the answers of a group that do not enter the buffer with it."""
        group = self._groups.get(draw, _Group())
        for sample, reason in group.failed.items():
            self._decide(f'{DROPPED}{reason}', group.answers.get(sample, {}), self._trained_version)
            group.answers[sample] = collections.Counter()
        group.failed = {}

    def _decide(self, fate: str, tokens: Mapping[int, int], version: int) -> None:
        """Gives tokens, by policy version, this fate while the weights are at `version`."""
        for born, count in tokens.items():
            if count:
                self.fates.setdefault(fate, collections.Counter())[version - born] += count
                self._open[born] -= count
                if not self._open[born]:
                    del self._open[born]
                if self.versions is not None:
                    self.versions.setdefault(fate, collections.Counter())[born] += count

    def _open_versions(self) -> dict[int, int]:
        return {version: tokens for version, tokens in self._open.items() if tokens}

    def _violate(self, sentence: str) -> None:
        if not self.violations:  # the first is enough to find the fault
            self.violations.append(sentence)


def tell_fates(metrics: Sequence[Line]) -> bool:
    """Whether these rows of metrics have the fates of their batches' tokens."""
    return all(name in line for line in metrics for name in IN_BATCH.values())


def _total(group: _Group) -> Counts:
    total: Counts = collections.Counter()
    for tokens in group.answers.values():
        total.update(tokens)
    return total


def _by_version(pairs: Sequence[Sequence[int]]) -> dict[int, int]:
    return {pair[0]: pair[1] for pair in pairs}


def _describe(tokens: Mapping[int, int]) -> str:
    return '{' + ', '.join(f'{version}: {tokens[version]}' for version in sorted(tokens)) + '}'


def _as_text(tokens: Mapping[int, int]) -> dict[str, int]:
    return {str(key): count for key, count in tokens.items()}


def _as_counts(tokens: Mapping[str, int]) -> Counts:
    return collections.Counter({int(key): count for key, count in tokens.items()})


def _group_state(group: _Group) -> _GroupState:
    return {
        'answers': {str(sample): _as_text(tokens) for sample, tokens in group.answers.items()},
        'failed': {str(sample): reason for sample, reason in group.failed.items()},
        'received': _as_text(group.received),
    }


def _read_group(state: _GroupState) -> _Group:
    answers = {int(sample): _as_counts(tokens) for sample, tokens in state['answers'].items()}
    failed = {int(sample): reason for sample, reason in state['failed'].items()}
    return _Group(answers, failed, _as_counts(state['received']))
