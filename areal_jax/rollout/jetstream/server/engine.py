"""JetStream's Engine over the relay: `prefill` submits a call, `insert` gives it a slot, `generate` takes a step."""

from __future__ import annotations

import logging

import jax
import numpy as np
from jetstream.engine import engine_api, tokenizer_api

from areal_jax.errors import UserError
from areal_jax.rollout.jetstream.server.relay import OpenCall, Relay
from areal_jax.rollout.jetstream.server.result_columns import count_columns

_log = logging.getLogger('areal_jax.jetstream')


class StepError(UserError):
    """Something has failed between the service and JetStream: the answers are lost, and the server goes on."""


class RelayEngine(engine_api.Engine):
    """Parameters, prefix and decode state of JetStream are not used: our engine owns weights and cache.

    Nothing is raised: JetStream ends the process where one of its threads raises. An exception ends the calls that it
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
        """The call, which was submitted; RelayDriver gives it in the place of the tokens."""
        try:
            self._relay.submit(padded_tokens)
        except Exception as error:
            self._relay.fail(padded_tokens, describe_failure('prefill', error))
        return padded_tokens

    def insert(self, prefix: OpenCall, decode_state: None, slot: int) -> None:
        self._relay.insert(prefix, slot)

    def generate(self, params: object, decode_state: None) -> tuple[None, engine_api.ResultTokens]:
        """Waits for the next delivered dispatch."""
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
        """Not used: nothing is padded."""
        return 1

    @property
    def mesh(self) -> jax.sharding.Mesh:
        raise NotImplementedError('the service decodes, JetStream does not')

    @property
    def colocated_cpus(self) -> None:
        return None


class IdTokenizer(tokenizer_api.Tokenizer):
    """Ids without texts: prompts are encoded before, and the texts of answers are made in engine.py."""

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
        """None: JetStream would leave them out of the reply, and our engine ends at those of the call."""
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
    """The error that callers get; the traceback goes to the log."""
    _log.error('in %s of JetStream', where, exc_info=error)
    return StepError(f'{where} failed ({type(error).__name__}: {error}): send the request again')
