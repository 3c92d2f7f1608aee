"""The rules of generation in this process: every token of an answer comes from a dispatch that had its KV cache.

log_rules.py puts every event of a run with engines in this process through them. A dispatch of decoding gives each
answer in its slots `steps` tokens, or fewer where the answer ends in it. So the dispatches of an answer and its length
determine each other. generation_rules.py has what is computed before.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

from areal_jax.events.schema import DecodeEvent, Event, FinishEvent, MoveEvent, PreemptEvent
from areal_jax.report.engine_work import PromptLengths
from areal_jax.report.rules.generation_rules import Answer, CacheRules, Dispatch

KINDS = frozenset(
    (
        'log', 'evaluate', 'route', 'save', 'decode', 'finish', 'preempt', 'move', 'leave', 'prefill', 'interrupt',
        'load', 'run_start', 'run_done',
    )
)  # fmt: skip


class GenerationRules:
    """Follows dispatches and answers, event by event.

    Args:
      keeps_cache: whether answers keep their KV cache under new weights (rollout.kv_policy='keep').
      single_turn: whether an answer is one request; else the lengths of answers are not compared with dispatches.
      max_new_tokens: of an answer.
    """

    kinds = KINDS

    def __init__(self, *, keeps_cache: bool, single_turn: bool, max_new_tokens: int):
        self._single_turn, self._max_new_tokens = single_turn, max_new_tokens
        self._evaluating = False
        self._answers: dict[str, Answer] = {}  # under way, by request
        self._lengths = PromptLengths()
        self._cache = CacheRules(self._answers, self._lengths, keeps_cache=keeps_cache, single_turn=single_turn)
        self._requests: dict[tuple[int, int], str] = {}  # of training, by draw and sample
        self._ended: dict[str, str] = {}  # request -> reason
        self._dispatches: collections.Counter[str] = collections.Counter()  # number of the last one, by engine

    def apply(self, event: Event) -> Iterator[str]:
        """Which rules the event breaks, each as a sentence."""
        if event['kind'] == 'log':
            yield from self._start_anew()
        elif event['kind'] == 'evaluate':
            self._evaluating = event['mode'] == 'start'
            yield from self._end_evaluation()
        elif event['kind'] == 'route':
            if not self._evaluating:
                self._requests[event['draw'], event['sample']] = event['request']
            new = Answer((self._evaluating, event['draw']))
            self._answers.setdefault(event['request'], new).forget_cache()  # of the turn before
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
            del self._dispatches[event['engine']]  # one that joins under its name counts anew
        yield from self._cache.apply(event)

    # Where the program stands still.

    def _start_anew(self) -> Iterator[str]:
        """What an evaluation had under way is asked again; answers of training go on as the checkpoint has them."""
        for name in [name for name, one in self._answers.items() if one.prompt[0]]:
            del self._answers[name]
        self._evaluating = False
        yield from self._pause()
        self._dispatches.clear()

    def _pause(self) -> Iterator[str]:
        """Everything that was generated is delivered."""
        for answer in self._answers.values():
            if answer.last is not None:
                yield from self._settle(answer, answer.last.steps)

    def _end_evaluation(self) -> Iterator[str]:
        """The log does not tell how long its answers are; the positions that their last dispatches saw may."""
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
            elif self._single_turn and self._ended.get(request) != 'cancelled':  # agents end answers of their own
                yield f'{dispatch.name} decodes {request}, which is not under way'
        yield from self._compare(dispatch)

    def _settle(self, answer: Answer, tokens: int) -> Iterator[str]:
        """The answer got so many tokens of its last dispatch; 0 = none, or unknown."""
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
        """A request leaves its slot, or its engine, with all tokens; of a preempted one the prompt counts too."""
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
        if (event['reason'] == 'length' and tokens != self._max_new_tokens) or tokens > self._max_new_tokens:
            yield (
                f'{name} has {tokens} tokens and ended by {event["reason"]!r}, with {self._max_new_tokens} at most '
                '(rollout.max_new_tokens)'
            )
        versions, counts = [version for version, _ in answer.segments], [count for _, count in answer.segments]
        if event['versions'] != versions or event.get('lengths', counts) != counts:
            yield (
                f'{name} has {event.get("lengths", tokens)} tokens of versions {event["versions"]}, and its dispatches '
                f'gave it {counts} of {versions}'
            )
