"""JetStream's Driver: its threads carry our calls, and an error in one of them is told and kills no process."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from jetstream.core import orchestrator
from jetstream.core.utils.return_sample import ReturnSample

from areal_jax.rollout.jetstream.server.engine import RelayEngine, describe_failure
from areal_jax.rollout.jetstream.server.relay import OpenCall, Relay
from areal_jax.rollout.jetstream.server.result_columns import drop_fillers


@dataclasses.dataclass
class RelayRequest(orchestrator.ActiveRequest):
    """JetStream's request whose content is one of our calls."""

    relay: Relay | None = None  # that ends the call

    def enqueue_samples(self, generated_samples: list[ReturnSample]) -> None:
        """Without fillers, with the text that the tokens add; nothing where there is neither.

        An exception would end JetStream's thread: it ends the call.
        """
        (sample,) = generated_samples
        token_ids, text = drop_fillers(sample.token_ids), ''
        try:
            text = self.prefill_content.extend_text(token_ids)
        except Exception as error:
            assert self.relay is not None
            self.relay.end(self.prefill_content, describe_failure('the text of an answer', error))
        if token_ids or text:
            super().enqueue_samples([ReturnSample(text=[text] if text else [], token_ids=token_ids)])


class RelayDriver(orchestrator.Driver):
    """Starts its threads when it is made.

    One engine prefills and decodes (`interleaved`), so that nothing is transferred between devices.

    Args:
      on_death: called on the thread of JetStream that an error has ended; the driver is of no use then.
    """

    def __init__(self, relay: Relay, on_death: Callable[[BaseException], None]):
        self._relay, self._on_death = relay, on_death
        engine = RelayEngine(relay)
        super().__init__(
            prefill_engines=[engine], generate_engines=[engine], prefill_params=[None], generate_params=[None],
            interleaved_mode=True, jax_padding=False,
        )  # fmt: skip

    def place_request_on_prefill_queue(self, request: orchestrator.ActiveRequest) -> None:
        super().place_request_on_prefill_queue(RelayRequest(**vars(request), relay=self._relay))

    def stop(self) -> None:
        self._relay.close()
        super().stop()

    def _process_prefill_content(self, request: RelayRequest, *_: object) -> tuple[OpenCall, int]:
        """The call in the place of padded tokens: JetStream hands it to RelayEngine.prefill."""
        return request.prefill_content, 0

    # The bodies of JetStream's threads.

    def _prefill_thread(self, idx: int) -> None:
        self._tell_death(super()._prefill_thread, idx)

    def _transfer_thread(self, idx: int) -> None:
        self._tell_death(super()._transfer_thread, idx)

    def _generate_thread(self, idx: int) -> None:
        body = functools.partial(super()._generate_thread, idx)
        free = self._generate_slots[idx]
        self._tell_death(lambda _: run_through_idleness(body, lambda: free.qsize() == self._relay.slots), idx)

    def _detokenize_thread(self, idx: int) -> None:
        self._tell_death(super()._detokenize_thread, idx)

    def _tell_death(self, body: Callable[[int], None], idx: int) -> None:
        try:
            body(idx)
        except Exception as error:
            if self.live:
                self._on_death(error)


def run_through_idleness(body: Callable[[], None], is_idle: Callable[[], bool]) -> None:
    """Runs JetStream's loop of steps, and again where it asserts that a slot is taken and none is.

    It looks for free slots, finds no call for them, and then asserts that not all are free; its detokenizer may give
    the last one back in between. Nothing is lost then: the loop has put its own slot back, and keeps no state of ours.
    """
    while True:
        try:
            return body()
        except AssertionError:
            if not is_idle():
                raise
