"""Which blocks of the KV cache hold which positions of the requests in slots.

A request's sequence begins with the prefix of its group: its prompt without the last token, which the first request in
need of it computes for all. Whole blocks of the prefix are shared, the block in which it ends is copied for each
further request, and everything behind it is the request's own.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from areal_jax.errors import UserError
from areal_jax.rollout.blocks import BlockPool, CachedSequence, Prefix, PrefixIndex, PrefixKey
from areal_jax.rollout.running_request import RunningRequest


class CacheBudgetError(UserError, ValueError):
    """A KV cache that can not hold one sequence; the message names the fields and the fix."""


class CacheTable:
    """Gives blocks to requests, in constant time per block.

    Args:
      version: policy version of the requests that are not pinned to one.
      steps: tokens of a sequence in one dispatch of decoding.
    """

    def __init__(self, cache_blocks: int, block_tokens: int, *, context_tokens: int, steps: int, version: int):
        if cache_blocks * block_tokens < context_tokens:
            raise CacheBudgetError(
                f'rollout.cache_tokens={cache_blocks * block_tokens} can not hold one sequence of '
                f'rollout.context_tokens={context_tokens}; raise the former to {context_tokens} or more, or lower the '
                'latter'
            )
        self._block_tokens, self._steps, self.version = block_tokens, steps, version
        self.pool = BlockPool(cache_blocks)
        self.prefixes = PrefixIndex(self.pool)

    # Requests come and go.

    def open(self, running: RunningRequest) -> None:
        self.prefixes.open(self._key(running))

    def close(self, running: RunningRequest) -> None:
        """The request has ended."""
        self.release(running)
        self.prefixes.close(self._key(running))

    def clear(self, version: int, requests: Iterable[RunningRequest]) -> None:
        """Forgets every prefix; `requests` are the open requests, `version` is the version of new prefixes."""
        self.version = version
        self.prefixes.clear(map(self._key, requests))

    # Requests in slots.

    def place(self, running: RunningRequest, *, at_any_cost: bool) -> bool:
        """Gives a request blocks for all its tokens and one dispatch; False where they are not free.

        Prefixes without an open request are dropped for it, and `at_any_cost` all that no request in a slot needs.
        """
        length = len(running.request.prompt_tokens) - 1
        whole, ends_inside = divmod(length, self._block_tokens)
        prefix = self.prefixes.find(self._key(running)) if length else None
        found = _count_found(prefix)
        number = self._blocks_for(running) - whole
        takes_tail = prefix is not None and prefix.tail is not None and not prefix.lent
        missing = number - takes_tail if prefix is not None or not length else whole + number
        reclaimed = self.prefixes.reclaim_all(missing, prefix) if at_any_cost else self.prefixes.reclaim(missing)
        if not reclaimed:
            return False
        if prefix is None and length:
            blocks = self.pool.allocate(whole + bool(ends_inside))
            tail = blocks.pop() if ends_inside else None
            tokens = np.asarray(running.request.prompt_tokens[:-1], np.int32)
            prefix, takes_tail = Prefix(self._key(running), tokens, blocks, tail), tail is not None
        own = [prefix.tail] if prefix is not None and prefix.tail is not None and takes_tail else []
        own += self.pool.allocate(number - len(own))
        if prefix is not None:
            self.prefixes.use(prefix)
            prefix.lent |= takes_tail
            prefix.expected += 1
        blocks = [*(prefix.whole if prefix is not None else ()), *own]
        running.cached = CachedSequence(prefix, own, blocks, takes_tail)
        if running.cached_tokens is None:
            running.cached_tokens = found
        return True

    def attach(self, running: RunningRequest) -> None:
        """The request reads the prefix, which is complete, and goes on after it."""
        cached = running.cached
        assert cached is not None
        cached.is_attached = True
        if cached.prefix is not None:
            self.pool.share(cached.prefix.whole)
            cached.prefix.expected -= 1
            cached.filled = len(cached.prefix.tokens)

    def grow(self, running: RunningRequest) -> bool:
        """Gives a request that decodes blocks for one more dispatch; False where they are not free.

        Every prefix that no request in a slot is about to read is dropped for it.
        """
        cached = running.cached
        assert cached is not None
        number = self._blocks_for(running) - len(cached.blocks)
        if number <= 0:
            return True
        if not self.prefixes.reclaim_all(number):
            return False
        blocks = self.pool.allocate(number)
        cached.own += blocks
        cached.blocks += blocks
        return True

    def retract(self, running: RunningRequest) -> None:
        """Frees the blocks of a request that goes on later."""
        running.retractions += running.cached is not None and running.cached.filled > 0
        self.release(running)

    def release(self, running: RunningRequest) -> None:
        """Frees the blocks of a request, if it has any."""
        cached, running.cached = running.cached, None
        if cached is None:
            return
        own, prefix = cached.own, cached.prefix
        if prefix is not None:
            if cached.is_attached:
                self.pool.release(prefix.whole)
            else:
                prefix.expected -= 1
            if cached.has_tail and self.prefixes.give_back_tail(prefix):
                own = own[1:]
        self.pool.release(own)

    def check(self, requests: Iterable[RunningRequest]) -> None:
        """Asserts that each block is held by the prefixes and these requests alone, and by one where it is written."""
        held = list(self.prefixes.held())
        for running in requests:
            if (cached := running.cached) is not None:
                held += cached.blocks if cached.is_attached else cached.own
                assert all(self.pool.count(block) == 1 for block in cached.own)
                assert len(cached.blocks) * self._block_tokens >= cached.filled
        self.pool.check(held)
        self.prefixes.check()

    def _key(self, running: RunningRequest) -> PrefixKey:
        version = running.request.version
        return self.version if version is None else version, running.prompt_key

    def _blocks_for(self, running: RunningRequest) -> int:
        """Blocks that hold the tokens of a request and of its next dispatch."""
        positions = min(len(running) - 1 + self._steps, running.limit - 1)
        return -(-positions // self._block_tokens)


def _count_found(prefix: Prefix | None) -> int:
    """Tokens of a prefix that are in the cache, or that another request is computing."""
    if prefix is None:
        return 0
    return len(prefix.tokens) if prefix.expected else prefix.filled
