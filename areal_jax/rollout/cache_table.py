"""The table of KV cache blocks: which block holds which positions of the requests in slots.

A request's sequence begins with the prefix of its group: its prompt without the last token. The first request that
needs the prefix computes it for all. Whole blocks of the prefix are shared, the block in which it ends is copied for
each further request, and later blocks belong to the request alone.

The blocks of an answer that has ended are free, and keep their content until they are reallocated. A new prefix begins
with the longest kept sequence that the prompt continues: so the next turn of a conversation computes only its new
tokens. Whole blocks are shared with the kept sequence, the block in which it ends is copied.

Layers with a window may have a pool of their own (window_blocks.py). A prompt can then begin with a kept sequence where
the parts of the last window are left: else with a shorter beginning of it, or with none.

Recurrent layers have states (state_pool.py), each of one length. A prompt can then begin with a kept sequence as far as
there is a state: where an earlier prompt or answer ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from areal_jax.errors import UserError
from areal_jax.rollout.blocks import (
    BlockIndex,
    BlockPool,
    CachedSequence,
    Match,
    Prefix,
    PrefixIndex,
    PrefixKey,
    extend_digests,
)
from areal_jax.rollout.running_request import RunningRequest
from areal_jax.rollout.state_pool import StateSizes, build_states
from areal_jax.rollout.window_blocks import WindowSizes, build_windows
from areal_jax.types import is_repeated


class CacheBudgetError(UserError, ValueError):
    """A KV cache that can not hold one sequence; the message names the fields and the fix."""


class CacheTable:
    """Gives blocks to requests, in constant time per block.

    Args:
      version: policy version of the requests that are not pinned to one.
      steps: tokens per sequence in one decode dispatch.
      windows: the pool of the layers with a window; None = all layers share the blocks.
      states: the pool of the states of recurrent layers; None = there are none.
    """

    def __init__(
        self,
        cache_blocks: int,
        block_tokens: int,
        *,
        context_tokens: int,
        steps: int,
        version: int,
        windows: WindowSizes | None = None,
        states: StateSizes | None = None,
    ):
        if cache_blocks * block_tokens < context_tokens:
            raise CacheBudgetError(
                f'rollout.cache_tokens={cache_blocks * block_tokens} can not hold one sequence of '
                f'rollout.context_tokens={context_tokens}; raise the former to {context_tokens} or more, or lower the '
                'latter'
            )
        self._block_tokens, self._steps, self.version = block_tokens, steps, version
        self.windows = build_windows(windows, cache_blocks, block_tokens)
        self.pool = BlockPool(cache_blocks, BlockIndex(block_tokens, self.windows))
        self.states = build_states(states, block_tokens)
        self.prefixes = PrefixIndex(self.pool, self.states)

    # Requests come and go.

    def open(self, running: RunningRequest) -> None:
        self.prefixes.open(self._key(running))

    def close(self, running: RunningRequest, *, keep: bool = False, past_end: bool = False) -> None:
        """Releases an ended request; `keep`: a later prompt may begin with its prompt and answer.

        `past_end`: the device has decoded tokens behind the end, so that its recurrent state is of no use.
        """
        if keep:
            self._keep(running, past_end)
        self.release(running)
        self.prefixes.close(self._key(running))

    def clear(self, version: int, requests: Iterable[RunningRequest]) -> None:
        """Forgets every prefix and all kept blocks.

        `requests` are the open requests, `version` is the version of new prefixes.
        """
        self.version = version
        self.prefixes.clear(map(self._key, requests))

    # Requests in slots.

    def place(self, running: RunningRequest, *, at_any_cost: bool) -> bool:
        """Gives a request blocks for all its tokens and one dispatch; False if not enough are free.

        `at_any_cost`: drops prefixes that no request in a slot needs.
        """
        if len(running.request.prompt_tokens) == 1:
            missing = self._blocks_for(running)
            if not self._make_free(missing, None, at_any_cost):
                return False
            self._enter(running, None, self.pool.allocate(missing), found=0, has_tail=False)
            return True
        prefix = self.prefixes.find(self._key(running))
        if prefix is not None and not self._can_continue(prefix):
            self.prefixes.drop(prefix)  # no request in a slot expects it, or its parts and its state would be there
            prefix = None
        if prefix is None:
            return self._place_first(running, at_any_cost)
        return self._place_further(running, prefix, at_any_cost)

    def take_copies(self) -> list[tuple[int, int]]:
        """Returns (source, target) blocks to be copied before the next dispatch writes anything, in this order."""
        return self.prefixes.take_copies()

    def hold(self, target: Prefix | CachedSequence, start: int, stop: int) -> None:
        """Prepares a dispatch that writes positions [start, stop) of a prefix or sequence in the layers with a window.

        What it does not see any more is given to others. `stop` may be `start`: then only what it sees is held.
        """
        self.windows.hold(target.need, target.blocks, start, stop)

    def settle(self, target: Prefix | CachedSequence) -> None:
        """Gives away what the next token does not see, after a dispatch; does nothing for what was released."""
        if target.need.blocks:
            self.hold(target, target.filled, target.filled)

    def hold_steps(self, running: RunningRequest) -> None:
        """Prepares a dispatch of decoding of this request, see `hold`."""
        cached = running.cached
        assert cached is not None
        self.hold(cached, cached.filled, self._positions_for(running))

    def attach(self, running: RunningRequest) -> None:
        """Lets the request read its prefix, which is complete, and continue after it."""
        cached = running.cached
        assert cached is not None
        cached.is_attached = True
        if cached.prefix is not None:
            self.pool.share(cached.prefix.whole)
            self.prefixes.let_go(cached.prefix)
            cached.filled = len(cached.prefix.tokens)

    def grow(self, running: RunningRequest) -> bool:
        """Gives a decoding request the blocks for one more dispatch; False if not enough are free.

        Drops prefixes that no request in a slot will read, if needed.
        """
        cached = running.cached
        assert cached is not None
        number = self._blocks_for(running) - len(cached.blocks)
        if number <= 0:
            return True
        if not self.prefixes.reclaim(number):
            return False
        blocks = self.pool.allocate(number)
        cached.own += blocks
        cached.blocks += blocks
        return True

    def cover(self, running: RunningRequest) -> None:
        """Adds missing blocks of generated tokens; only several dispatches in one (`count_quiet`) leave any missing."""
        cached = running.cached
        assert cached is not None
        number = -(-cached.filled // self._block_tokens) - len(cached.blocks)
        if number > 0:
            blocks = self.pool.allocate(number)
            cached.own += blocks
            cached.blocks += blocks

    def count_quiet(self, rows: int) -> int:
        """The number of decode dispatches that surely find their blocks; includes one whose blocks are allocated."""
        return 1 + self.pool.free // rows * self._block_tokens // self._steps

    def retract(self, running: RunningRequest) -> None:
        """Frees the blocks of a request that continues later."""
        running.retractions += running.cached is not None and running.cached.filled > 0
        self.release(running)

    def release(self, running: RunningRequest) -> None:
        """Frees the blocks of a request, if it has any."""
        cached, running.cached = running.cached, None
        if cached is None:
            return
        own, prefix = cached.own, cached.prefix
        self.windows.release(cached.need)
        self.states.release(cached)
        has_given = prefix is not None and cached.has_tail and self.prefixes.give_back_tail(prefix)
        self.pool.release(reversed(own[has_given:]))  # the end is reallocated first
        if prefix is not None and cached.is_attached:
            self.pool.release(reversed(prefix.whole))
        elif prefix is not None:
            self.prefixes.let_go(prefix)

    def check(self, requests: Iterable[RunningRequest]) -> None:
        """Asserts that only prefixes and these requests hold blocks, and that a block being written has one holder."""
        held, needs = list(self.prefixes.held()), self.prefixes.needs()
        with_states: list[Prefix | CachedSequence] = [*self.prefixes.expected()]
        for running in requests:
            if (cached := running.cached) is not None:
                needs.append(cached.need)
                with_states.append(cached)
                held += cached.blocks if cached.is_attached else cached.own
                assert all(self.pool.count(block) == 1 for block in cached.own)
                assert not any(block in self.pool.index for block in cached.own)
                assert len(cached.blocks) * self._block_tokens >= cached.filled
        self.pool.check(held)
        self.prefixes.check()
        self.windows.check(needs)
        self.states.check(with_states, self.prefixes.spared())

    def _can_continue(self, prefix: Prefix) -> bool:
        return self.windows.covers(prefix.blocks, prefix.filled) and self.states.covers(prefix)

    def _place_first(self, running: RunningRequest, at_any_cost: bool) -> bool:
        """Places a request with a new prefix, which begins with the longest kept match."""
        version, key = self._key(running)
        tokens = np.ascontiguousarray(running.request.prompt_tokens[:-1], np.int32)
        if running.prompt_digests is None:
            running.prompt_digests = extend_digests([running.root_digest], tokens, self._block_tokens)
        found = self.pool.index.find(version, running.prompt_digests, tokens)
        match = self._shorten(found, version, running.prompt_digests, tokens)
        place = 0 if match.tail is None else self.windows.place(match.tail)
        self.pool.share(match.blocks)
        missing = self._blocks_for(running) - len(match.blocks)
        if not self._make_free(missing, None, at_any_cost):
            self.pool.release(reversed(match.blocks))
            return False
        if match.tail is not None and match.goes_on:
            self.pool.give_first(match.tail)  # this request keeps a longer sequence at its end
        blocks = [*match.blocks, *self.pool.allocate(missing)]
        whole, ends_inside = divmod(len(tokens), self._block_tokens)
        tail = blocks[whole] if ends_inside else None
        prefix = Prefix(
            (version, key), tokens, running.prompt_digests, blocks[:whole], tail, match.length,
            lent=tail is not None, found=match.length,
        )  # fmt: skip
        if match.tail is not None:
            self.prefixes.copy(prefix, match.tail, blocks[len(match.blocks)], place)
        self.states.branch(prefix, version, prefix.digests, tokens[: match.length])
        self.windows.mark_end(blocks, found.length)
        self._enter(running, prefix, blocks[whole:], found=match.length, has_tail=tail is not None)
        return True

    def _shorten(self, match: Match, version: int, digests: Sequence[bytes], tokens: np.ndarray) -> Match:
        """Returns the longest part of a match that layers with a window and recurrent layers can continue."""
        while True:
            match = self._shorten_to_window(match)
            length = self.states.longest(version, digests, tokens[: match.length])
            if length == match.length:
                return match
            match = match.cut(length, self._block_tokens)

    def _shorten_to_window(self, match: Match) -> Match:
        """Returns the longest part of a match behind which the layers with a window find what they see."""
        if match.tail is not None and self.windows.covers([*match.blocks, match.tail], match.length):
            return match
        if (count := self.windows.longest(match.blocks)) == len(match.blocks) and match.tail is None:
            return match
        return Match(match.blocks[:count], None, count * self._block_tokens, goes_on=False)

    def _place_further(self, running: RunningRequest, prefix: Prefix, at_any_cost: bool) -> bool:
        tail = None if prefix.lent else prefix.tail
        missing = self._blocks_for(running) - len(prefix.whole) - (tail is not None)
        if not self._make_free(missing, prefix, at_any_cost):
            return False
        own, place = [] if tail is None else [tail], None
        if tail is not None and tail in self.pool.index:
            # the block keeps an ended answer: the prefix continues in a copy, and holds no additional block
            place = self.windows.place(tail)
            self.pool.release(own)
            own, missing = [], missing + 1
        own += self.pool.allocate(missing)
        if tail is not None:
            self.prefixes.lend_tail(prefix, own[0], place)
        found = len(prefix.tokens) if prefix.expected else prefix.filled
        self._enter(running, prefix, own, found=found, has_tail=tail is not None)
        return True

    def _make_free(self, number: int, prefix: Prefix | None, at_any_cost: bool) -> bool:
        return self.prefixes.reclaim(number, prefix) if at_any_cost else self.pool.free >= number

    def _enter(
        self, running: RunningRequest, prefix: Prefix | None, own: list[int], *, found: int, has_tail: bool
    ) -> None:
        if prefix is not None:
            self.prefixes.use(prefix)
            self.prefixes.expect(prefix)
        blocks = [*(prefix.whole if prefix is not None else ()), *own]
        running.cached = CachedSequence(self._key(running)[0], prefix, own, blocks, has_tail)
        self.states.allocate(running.cached)
        if running.cached_tokens is None:
            running.cached_tokens = found

    def _keep(self, running: RunningRequest, past_end: bool) -> None:
        """Keeps blocks and state of a sequence, unless they are of several versions or its tokens were only counted."""
        cached, version = running.cached, self._key(running)[0]
        assert cached is not None
        tokens = running.tokens[: cached.filled]
        if is_repeated(tokens):
            return
        if cached.version == version:
            known = [running.root_digest] if cached.prefix is None else cached.prefix.digests
            digests = extend_digests(known, tokens, self._block_tokens)
            self.pool.keep(version, digests, tokens, cached.blocks)
            if not past_end:
                self.states.keep(cached, version, digests, tokens)

    def _key(self, running: RunningRequest) -> PrefixKey:
        version = running.request.version
        return self.version if version is None else version, running.prompt_key

    def _blocks_for(self, running: RunningRequest) -> int:
        return -(-self._positions_for(running) // self._block_tokens)

    def _positions_for(self, running: RunningRequest) -> int:
        """The positions that are in the cache after one more dispatch of decoding."""
        return min(len(running) - 1 + self._steps, running.limit - 1)
