"""A request on one server, as its client sees it."""

from __future__ import annotations

from areal_jax.protocols import Clock
from areal_jax.rollout.running_request import GrowingAnswer
from areal_jax.types import GenerationRequest


class ServerRequest(GrowingAnswer):
    """The iteration raises RequestFailedError after the segments that came, where the rest of the answer is lost."""

    def __init__(self, request: GenerationRequest, clock: Clock, engine: str):
        super().__init__(request, clock, engine)
        self.wire_id = ''  # of the call under way
        self.versions: list[int] = []  # of the weights that the call has lived under, in order
        self.vain_calls = 0  # in a row that were aborted by somebody else before their first token
