"""The rules of generation in this process: every token of an answer comes from a dispatch that had its KV cache.

log_rules.py applies them to runs with engines in this process. A dispatch of decoding gives each answer in its slots
`steps` tokens, or fewer if the answer ends in it. So the dispatches of an answer and its length determine each other.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from areal_jax.config.drawn_lengths import AnswerLimits
from areal_jax.events.schema import (
    DecodeEvent,
    Event,
    FinishEvent,
    InterruptEvent,
    MoveEvent,
    PreemptEvent,
    PrefillEvent,
    RunDoneEvent,
    RunStartEvent,
)
from areal_jax.report.engine_work import Key, PromptLengths, can_end, can_sum

_FIRST_VERSION = 4  # of the log; since then `prefill` names every request that it computes, and has `rebuilt`


@dataclasses.dataclass(eq=False)
class Dispatch:
    """One dispatch of decoding, until the tokens of all its answers are known."""

    name: str
    steps: int
    version: int
    tokens: int  # delivered to answers
    positions: int | None  # seen by its rows; None = not comparable
    known: int = 0  # the part of `tokens` in answers whose share is known
    seen: int = 0  # positions that these tokens saw, without prompts
    prompts: collections.Counter[Key] = dataclasses.field(default_factory=collections.Counter)  # known tokens by prompt
    open: int = 0  # answers whose share is not known yet
    ended: list[tuple[Key, int]] = dataclasses.field(default_factory=list)  # of an evaluation: prompt, tokens before

    def compare_ended(self, lengths: Mapping[Key, int]) -> str:
        """Checks that the answers that ended in it can explain the remaining tokens and positions; '' if they can."""
        assert self.positions is not None
        left = self.positions - self.seen - sum(lengths[key] * count for key, count in self.prompts.items())
        before = [lengths[key] + tokens for key, tokens in self.ended]
        if can_end(self.tokens - self.known, left, before, self.steps):
            return ''
        return (
            f'{self.name} has generated {self.tokens} tokens, and no answers that end in it make these of the '
            f'{self.positions} positions that it has seen'
        )


@dataclasses.dataclass(eq=False)
class Answer:
    """An answer under way."""

    prompt: Key
    segments: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (version, tokens), neighbors differ
    settled: int = 0  # tokens of the segments
    last: Dispatch | None = None  # the only dispatch whose share of tokens is not known
    computed: int | None = None  # version under which its KV cache is computed; None = it is not
    decoded: bool = False  # since its cache was computed

    def add(self, version: int, tokens: int) -> None:
        self.settled += tokens
        if self.segments and self.segments[-1][0] == version:
            tokens += self.segments.pop()[1]
        self.segments.append((version, tokens))

    @property
    def tokens(self) -> int:
        """Tokens so far, if it did not end in its last dispatch."""
        return self.settled + (self.last.steps if self.last else 0)

    def forget_cache(self) -> None:
        self.computed, self.decoded = None, False


@dataclasses.dataclass(eq=False)
class _Computing:
    """The prefill work from one instant at which all slots are ready to the next."""

    engine: str
    begins_empty: bool  # nothing is in the cache: every prompt is computed
    waiting: set[str] = dataclasses.field(default_factory=set)  # prefilled requests that have not decoded since
    own: int = 0  # tokens of started answers
    computed: int = 0  # tokens of started answers and their prompts
    computed_new: int = 0  # tokens of prompts whose answers have not started
    computed_own: int | None = 0  # the part of `computed` without prompts; None: before version 8 of the log
    begun: collections.Counter[Key] = dataclasses.field(default_factory=collections.Counter)  # started ones by prompt
    new: collections.Counter[Key] = dataclasses.field(default_factory=collections.Counter)

    def compare(self, lengths: Mapping[Key, int]) -> str:
        """Compares the computed tokens with the prompts: requests with equal prompts may share one computation."""
        least = sum({lengths[key] - 1 for key in (*self.begun, *self.new)}) if self.begins_empty else 0
        found = self.computed - self.own + self.computed_new
        if found < least:
            return f'{self.engine} goes on to decode, and {found} tokens of prompts were computed, which have {least}'
        for tokens, requests, words in (
            (self.computed - self.own, self.begun, f'computed again, beside {self.own} of their answers'),
            (self.computed_new, self.new, 'computed'),
        ):
            if not can_sum(tokens, ((lengths[key] - 1, count) for key, count in requests.items())):
                prompts = ', '.join(f'{lengths[key]} (draw {key[1]})' for key in requests) or 'none'
                return f'{self.engine} goes on to decode, {tokens} tokens were {words}, and the prompts have {prompts}'
        return ''


@dataclasses.dataclass(eq=False)
class _Engine:
    prefills: collections.deque[PrefillEvent] = dataclasses.field(default_factory=collections.deque)  # to begin
    decoding: dict[int, int | None] = dataclasses.field(default_factory=dict)  # version by run under way
    decoded: tuple[float, int | None] | None = None  # steps and version of a run whose `decode` is due
    interrupted_for: int | None = None  # version of the last interruption, until it is loaded
    is_empty: bool = True  # nothing was computed since the cache was dropped
    computing: _Computing | None = None
    is_torn: bool = False  # a request left during its prefill: part of its prompt may stay until the next version


class CacheRules:
    """Follows the KV cache of every answer, event by event.

    Args:
      answers: the answers under way, by request; the caller updates the mapping.
      lengths: the lengths of prompts, as far as the log determines them.
      keeps_cache: whether answers keep their KV cache under new weights.
      single_turn: whether an answer is one request.
    """

    def __init__(self, answers: Mapping[str, Answer], lengths: PromptLengths, *, keeps_cache: bool, single_turn: bool):
        self._answers, self._lengths = answers, lengths
        self._keeps_cache, self._single_turn = keeps_cache, single_turn
        self._is_covered = False  # by the version of the log
        self._engines: collections.defaultdict[str, _Engine] = collections.defaultdict(_Engine)

    def apply(self, event: Event) -> Iterator[str]:
        """Yields a sentence for each rule that the event breaks."""
        if event['kind'] == 'log':
            self._is_covered = event['version'] >= _FIRST_VERSION
            self._engines.clear()
            self._forget(self._answers)
        elif not self._is_covered:
            return
        elif event['kind'] == 'save':  # requests have left their slots
            self._forget(self._answers)
            for engine in self._engines.values():
                engine.computing, engine.is_torn, engine.is_empty = None, False, True
        elif event['kind'] == 'prefill':
            yield from self._prefill(event)
        elif event['kind'] in ('preempt', 'move'):
            self.end(event['request'])
            self._forget([event['request']])
        elif event['kind'] == 'leave':
            self._engines.pop(event['engine'], None)
        elif event['kind'] == 'interrupt':
            yield from self._interrupt(event)
        elif event['kind'] == 'load':
            engine = self._engines[event['engine']]
            if engine.interrupted_for not in (None, event['version']):
                due = engine.interrupted_for
                yield f'{event["engine"]} loads version {event["version"]}, and was interrupted for version {due}'
            engine.interrupted_for = None
        elif event['kind'] == 'run_start':
            yield from self._start_run(event)
        elif event['kind'] == 'run_done':
            self._end_run(event)
        elif event['kind'] == 'decode':
            yield from self._decode(event)

    def decode_row(self, dispatch: Dispatch, name: str, request: str, answer: Answer) -> Iterator[str]:
        """Notes that the answer was in a slot of the dispatch, and checks that its KV cache was computed."""
        if not self._is_covered:
            return
        answer.decoded = True
        if answer.computed != dispatch.version:
            state = 'not computed' if answer.computed is None else f'computed under version {answer.computed}'
            yield f'{dispatch.name} decodes {request} under version {dispatch.version}, and its KV cache was {state}'
        engine = self._engines[name]
        if engine.computing is None:
            return
        engine.computing.waiting.discard(request)
        if not engine.computing.waiting:
            computing, engine.computing = engine.computing, None
            if self._single_turn and not engine.is_torn:
                found = computing.computed if computing.computed_own is None else computing.computed_own
                if found < computing.own or computing.computed_own not in (None, computing.own):
                    yield (
                        f'{name} decodes answers of {computing.own} tokens, which were to be computed again, and '
                        f'{found} tokens were'
                    )
                else:
                    yield self._lengths.check((*computing.begun, *computing.new), computing.compare)

    def end(self, request: str) -> None:
        """Notes that a request has left its engine."""
        for engine in self._engines.values():
            if engine.computing is not None and request in engine.computing.waiting:
                engine.computing, engine.is_torn = None, True

    def _forget(self, requests: Iterable[str]) -> None:
        for request in requests:
            if request in self._answers:
                self._answers[request].forget_cache()

    # Dispatches: each event belongs to a run of the engine's lane.

    def _prefill(self, event: PrefillEvent) -> Iterator[str]:
        name, rebuilt = event['engine'], event.get('rebuilt', 0)
        if rebuilt > event['tokens']:
            yield f'{name} computes {rebuilt} tokens again, of {event["tokens"]} in all'
        if event['tokens'] - event.get('prompt_tokens', event['tokens']) > rebuilt:
            yield (
                f'{name} computes {event["tokens"]} tokens, {event["prompt_tokens"]} of prompts, the rest of answers '
                f'that have begun, and {rebuilt} of it again'
            )
        for request in event['requests']:
            answer = self._answers.get(request)
            if answer is None:
                yield f'{name} computes the KV cache of {request}, which is not under way'
            elif answer.decoded:
                yield f'{name} computes the KV cache of {request} again, and nothing has interrupted it'
        self._engines[name].prefills.append(event)

    def _start_run(self, event: RunStartEvent) -> Iterator[str]:
        if event['work'] not in ('prefill', 'decode'):
            return
        name = event['lane'] or ''
        engine, number = self._engines[name], event['run']
        if engine.decoded is not None:
            yield f'{name} begins run {number}, and the dispatch that ended before it has no event `decode`'
            engine.decoded = None
        if event['work'] == 'decode':
            engine.decoding[number] = event.get('version')
            if engine.prefills:
                yield f'{name} begins to decode in run {number}, and a `prefill` before it has no run'
                engine.prefills.clear()
            return
        prefill = engine.prefills.popleft() if engine.prefills else None
        if prefill is None or prefill['bucket'] != event['amount']:
            yield f'{name} begins a prefill of {event["amount"]:g} tokens in run {number}, which no `prefill` tells of'
        else:
            self._compute(engine, prefill, event.get('version'))

    def _compute(self, engine: _Engine, prefill: PrefillEvent, version: int | None) -> None:
        engine.computing = computing = engine.computing or _Computing(prefill['engine'], engine.is_empty)
        engine.is_empty = False
        rebuilt, (kept_new, kept_begun) = prefill.get('rebuilt', 0), prefill.get('kept', (0, 0))
        computing.computed += rebuilt + kept_begun
        computing.computed_new += prefill['tokens'] - rebuilt + kept_new
        if computing.computed_own is not None:
            own = prefill['tokens'] - prefill['prompt_tokens'] if 'prompt_tokens' in prefill else None
            computing.computed_own = None if own is None else computing.computed_own + own
        for request in prefill['requests']:
            answer = self._answers.get(request)
            if answer is None:
                continue
            answer.computed = version
            if request not in computing.waiting:
                computing.waiting.add(request)
                computing.own += answer.tokens
                (computing.begun if answer.tokens else computing.new)[answer.prompt] += 1

    def _end_run(self, event: RunDoneEvent) -> None:
        engine = self._engines.get(event['lane'] or '')
        if engine is not None and event['run'] in engine.decoding:
            engine.decoded = event['amount'] * event.get('joined', 1), engine.decoding.pop(event['run'])

    def _decode(self, event: DecodeEvent) -> Iterator[str]:
        engine = self._engines[event['engine']]
        if engine.decoded != (event['steps'], event['version']):
            yield (
                f'{event["engine"]} has dispatch {event["dispatch"]} of {event["steps"]} steps under version '
                f'{event["version"]}, and no such run of its lane has ended'
            )
        engine.decoded = None

    def _interrupt(self, event: InterruptEvent) -> Iterator[str]:
        name, version = event['engine'], event['to_version']
        for request in event['requests']:
            if request not in self._answers:
                yield f'{name} interrupts {request}, which is not under way'
        engine = self._engines[name]
        engine.interrupted_for, engine.computing, engine.is_torn = version, None, False
        if not self._keeps_cache:
            engine.is_empty = True
            self._forget(event['requests'])
            return
        for request in event['requests']:
            if request in self._answers:  # if its cache is only partly computed, another prefill names the request
                self._answers[request].computed = version


class GenerationRules:
    """Follows dispatches and answers, event by event.

    Args:
      keeps_cache: whether answers keep their KV cache under new weights.
      single_turn: whether an answer is one request; else the lengths of answers are not compared with dispatches.
      answers: the bounds on the tokens of each answer.
    """

    def __init__(self, *, keeps_cache: bool, single_turn: bool, answers: AnswerLimits):
        self._single_turn, self._limits = single_turn, answers
        self._evaluating = False
        self._answers: dict[str, Answer] = {}  # under way, by request
        self._lengths = PromptLengths()
        self._cache = CacheRules(self._answers, self._lengths, keeps_cache=keeps_cache, single_turn=single_turn)
        self._requests: dict[tuple[int, int], str] = {}  # of training, by draw and sample
        self._ended: dict[str, str] = {}  # request -> reason
        self._dispatches: collections.Counter[str] = collections.Counter()  # number of the last one, by engine

    def apply(self, event: Event) -> Iterator[str]:
        """Yields a sentence for each rule that the event breaks."""
        if event['kind'] == 'log':
            yield from self._start_anew()
        elif event['kind'] == 'evaluate':
            self._evaluating = event['mode'] == 'start'
            yield from self._end_evaluation()
        elif event['kind'] == 'route':
            if not self._evaluating:
                self._requests[event['draw'], event['sample']] = event['request']
            new = Answer((self._evaluating, event['draw']))
            self._answers.setdefault(event['request'], new).forget_cache()  # of the previous turn
        elif event['kind'] == 'save':
            yield from self._pause()
        elif event['kind'] == 'decode':
            yield from self._decode(event)
            yield from self._lengths.apply_waiting()
        elif event['kind'] == 'finish':
            yield from self._finish(event)
        elif event['kind'] == 'preempt' or event['kind'] == 'move':
            yield from self._give_up(event)
        elif event['kind'] == 'leave':
            del self._dispatches[event['engine']]  # an engine that joins under this name counts anew
        yield from self._cache.apply(event)

    # Instants at which the program stands still.

    def _start_anew(self) -> Iterator[str]:
        """Forgets answers of evaluations, which are requested again; answers of training go back to the checkpoint."""
        for name in [name for name, one in self._answers.items() if one.prompt[0]]:
            del self._answers[name]
        self._evaluating = False
        yield from self._pause()
        self._dispatches.clear()

    def _pause(self) -> Iterator[str]:
        """Settles every answer: all generated tokens have been delivered."""
        for answer in self._answers.values():
            if answer.last is not None:
                yield from self._settle(answer, answer.last.steps)

    def _end_evaluation(self) -> Iterator[str]:
        """Ends its answers. The log does not hold their lengths; positions of their last dispatches may tell them."""
        for name in [name for name, one in self._answers.items() if one.prompt[0]]:
            answer = self._answers.pop(name)
            if answer.last is not None:
                answer.last.ended.append((answer.prompt, answer.settled))
                yield from self._settle(answer, 0)

    # Dispatches of decoding, and the answers that they make.

    def _decode(self, event: DecodeEvent) -> Iterator[str]:
        name, number = event['engine'], event['dispatch']
        if number != self._dispatches[name] + 1:
            yield f'{name} has dispatch {number} after {self._dispatches[name]}'
        self._dispatches[name] = number
        lost, positions = event.get('discarded', 0), event.get('positions')
        dispatch = Dispatch(
            f'dispatch {number} of {name}', event['steps'], event['version'], event['tokens'] - lost,
            None if lost or not self._single_turn else positions,
        )  # fmt: skip
        for request in event['slots']:
            if request is None:
                continue
            answer = self._answers.get(request)
            if answer is not None:
                yield from self._cache.decode_row(dispatch, name, request, answer)
                if answer.last is not None:
                    yield from self._settle(answer, answer.last.steps)
                answer.last = dispatch
                dispatch.open += 1
            elif self._single_turn and self._ended.get(request) != 'cancelled':  # agents may end their answers
                yield f'{dispatch.name} decodes {request}, which is not under way'
        yield from self._compare(dispatch)

    def _settle(self, answer: Answer, tokens: int) -> Iterator[str]:
        """Notes that the answer got `tokens` tokens of its last dispatch; 0 = none, or unknown."""
        dispatch, answer.last = answer.last, None
        assert dispatch is not None
        dispatch.open -= 1
        dispatch.known += tokens
        if tokens:
            dispatch.seen += tokens * answer.settled + tokens * (tokens - 1) // 2
            dispatch.prompts[answer.prompt] += tokens
            answer.add(dispatch.version, tokens)
        yield from self._compare(dispatch)

    def _compare(self, dispatch: Dispatch) -> Iterator[str]:
        """Compares the tokens of a dispatch with the tokens of its answers, once all of them are known."""
        if dispatch.open or not self._single_turn:
            return
        rest, unknown = dispatch.tokens - dispatch.known, len(dispatch.ended)
        if not unknown <= rest <= unknown * dispatch.steps:
            had = f'{dispatch.known + unknown} or more' if unknown else f'{dispatch.known}'
            yield f'{dispatch.name} has generated {dispatch.tokens} tokens, and its answers had {had} of it'
        elif dispatch.positions is not None and not unknown:
            if not self._lengths.learn(dispatch.prompts, dispatch.positions - dispatch.seen):
                yield (
                    f'{dispatch.name} has seen {dispatch.positions} positions, against what others of its prompts saw, '
                    'and preempted requests told'
                )
        elif dispatch.positions is not None:
            prompts = [*dispatch.prompts, *(prompt for prompt, _ in dispatch.ended)]
            yield self._lengths.check(prompts, dispatch.compare_ended)

    def _give_up(self, event: PreemptEvent | MoveEvent) -> Iterator[str]:
        """Checks the tokens of a request that leaves its slot or engine; a preempted one counts its prompt too."""
        request, tokens = event['request'], event['tokens']
        answer = self._answers.get(request)
        if answer is None or not self._single_turn:
            if answer is None:
                yield f'{request} is given up with {tokens} tokens, and is not under way'
        elif event['kind'] == 'move':
            if tokens != answer.tokens:
                yield f'{request} moves with {tokens} tokens, and its dispatches gave it {answer.tokens}'
        else:
            had, length = answer.tokens, self._lengths.known.get(answer.prompt)
            name = f'the preempted {request} has {tokens} tokens'
            if length is not None and tokens != length + had:
                yield f'{name}, and its prompt of {length} with {had} of its answer makes {length + had}'
            elif length is None and not self._lengths.learn({answer.prompt: 1}, tokens - had):
                yield f'{name}, {had} of its answer, against what dispatches saw of its prompt'

    def _finish(self, event: FinishEvent) -> Iterator[str]:
        request = self._requests.pop((event['draw'], event['sample']), '')
        answer, name = self._answers.pop(request, None), f'sample {event["sample"]} of draw {event["draw"]}'
        self._ended[request] = event['reason']
        self._cache.end(request)
        if self._single_turn and answer is None:
            yield f'{name} is finished, and was not requested'
        elif self._single_turn and answer is not None:
            yield from self._compare_answer(event, answer, name)

    def _compare_answer(self, event: FinishEvent, answer: Answer, name: str) -> Iterator[str]:
        tokens, is_cancelled = event['tokens'], event['reason'] == 'cancelled'
        steps = answer.last.steps if answer.last else 0
        rest = tokens - answer.settled
        if not (rest in (0, steps) if is_cancelled else min(1, steps) <= rest <= steps) or not (tokens or is_cancelled):
            least, most = answer.settled + min(1, steps), answer.settled + steps
            yield f'{name} has {tokens} tokens, and its dispatches gave it {least} to {most}'
        if answer.last is not None:
            yield from self._settle(answer, rest)
        most = self._limits.of(event['draw'], event['sample'])
        if (event['reason'] == 'length' and tokens != most) or tokens > most:
            ended = f'{tokens} tokens and ended by {event["reason"]!r}'
            yield f'{name} has {ended}, with {most} at most ({self._limits.field})'
        versions, counts = [version for version, _ in answer.segments], [count for _, count in answer.segments]
        if event['versions'] != versions or event.get('lengths', counts) != counts:
            yield (
                f'{name} has {event.get("lengths", tokens)} tokens of versions {event["versions"]}, and its dispatches '
                f'gave it {counts} of {versions}'
            )
