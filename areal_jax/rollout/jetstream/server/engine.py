"""JetStream's Engine over the relay: `prefill` submits a call, `insert` gives it a slot, `generate` takes a step."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable

import jax
import numpy as np
from jetstream.core import orchestrator
from jetstream.core.utils.return_sample import ReturnSample
from jetstream.engine import engine_api, tokenizer_api

from areal_jax.errors import UserError
from areal_jax.rollout.jetstream.server.relay import OpenCall, Relay, count_columns, drop_fillers

_log = logging.getLogger('areal_jax.jetstream')


class StepError(UserError):
    """A failure between the service and JetStream: the answers are lost, and the server continues."""


class RelayEngine(engine_api.Engine):
    """JetStream's Engine without its parameters, prefix and decode state: our engine owns weights and cache.

    Raises nothing, because JetStream ends the process if one of its threads raises. An exception ends the calls that it
    concerns.
    """

    def __init__(self, relay: Relay):
        self._relay = relay

    def load_params(self, *args: object, **kwargs: object) -> None:
        return None

    def get_prefix_destination_sharding(self) -> None:
        return None

    def get_tokenizer(self) -> None:
        return None

    def build_tokenizer(self, metadata: object) -> tokenizer_api.Tokenizer:
        return IdTokenizer()

    def init_decode_state(self, *args: object, **kwargs: object) -> None:
        return None

    def prefill(
        self, *, params: object, existing_prefix: object = None, padded_tokens: OpenCall, true_length: int
    ) -> OpenCall:
        """Submits the call and returns it; RelayDriver passes the call instead of tokens."""
        try:
            self._relay.submit(padded_tokens)
        except Exception as error:
            self._relay.fail(padded_tokens, describe_failure('prefill', error))
        return padded_tokens

    def insert(self, prefix: OpenCall, decode_state: None, slot: int) -> None:
        self._relay.insert(prefix, slot)

    def generate(self, params: object, decode_state: None) -> tuple[None, engine_api.ResultTokens]:
        try:
            data = self._relay.take_step()
        except Exception as error:
            data = self._relay.fail_slots(describe_failure('generate', error))
        return None, _wrap(data, self._relay.steps)

    @property
    def max_concurrent_decodes(self) -> int:
        return self._relay.slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        """An unused value: nothing is padded."""
        return 1

    @property
    def mesh(self) -> jax.sharding.Mesh:
        raise NotImplementedError('the service decodes, JetStream does not')

    @property
    def colocated_cpus(self) -> None:
        return None


class IdTokenizer(tokenizer_api.Tokenizer):
    """A tokenizer without texts: prompts are encoded before, and the texts of answers are made elsewhere."""

    def encode(self, s: str, **kwargs: object) -> tuple[np.ndarray, int]:
        raise NotImplementedError('prompts are encoded in open_calls.py')

    def decode(self, token_ids: list[int], **kwargs: object) -> str:
        return ''

    @property
    def pad_id(self) -> int:
        return 0

    @property
    def eos_id(self) -> int:
        return 0

    @property
    def bos_id(self) -> int:
        return 0

    @property
    def stop_tokens(self) -> set[int]:
        """The empty set: JetStream would omit stop tokens from the reply, and our engine stops at the call's."""
        return set()


def _wrap(data: np.ndarray, steps: int) -> engine_api.ResultTokens:
    columns = count_columns(steps)
    return engine_api.ResultTokens(
        data=data,
        tokens_idx=(0, columns),
        valid_idx=(columns, 2 * columns),
        length_idx=(2 * columns, 2 * columns + 1),
        samples_per_slot=1,
    )


def describe_failure(where: str, error: Exception) -> StepError:
    """Returns the error for callers; the traceback goes to the log."""
    _log.error('in %s of JetStream', where, exc_info=error)
    return StepError(f'{where} failed ({type(error).__name__}: {error}): send the request again')


# JetStream's Driver: its threads carry our calls, and an error in a thread is reported instead of killing the process.


@dataclasses.dataclass
class RelayRequest(orchestrator.ActiveRequest):
    """JetStream's request whose content is one of our calls."""

    relay: Relay | None = None  # ends the call after an error

    def enqueue_samples(self, generated_samples: list[ReturnSample]) -> None:
        """Enqueues the tokens without fillers, with their text; enqueues nothing if there is neither.

        An exception ends the call, because it would end JetStream's thread.
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
    """JetStream's Driver over the relay; starts its threads when it is made.

    One engine prefills and decodes (`interleaved`), so that nothing is transferred between devices.

    Args:
      on_death: called on a thread of JetStream that an error has ended; the driver is unusable then.
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
        """Returns the call instead of padded tokens: JetStream passes it to RelayEngine.prefill."""
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
    """Runs JetStream's loop of steps, and again if it asserts wrongly that a slot is taken while all are free.

    The loop takes a free slot, finds no call for it, and then asserts that not all are free; its detokenizer may free
    the last one in between. Nothing is lost then: the loop has put its slot back, and keeps no state of ours.
    """
    while True:
        try:
            return body()
        except AssertionError:
            if not is_idle():
                raise
