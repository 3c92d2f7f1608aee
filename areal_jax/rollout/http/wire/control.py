"""Bodies and headers of the control routes, in SGLang's and in vLLM's form, and the rendering of pauses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, Self

import pydantic
from pydantic import Field

from areal_jax.files import JsonObject
from areal_jax.rollout.http.pauses import CLIENT, LONGEST_LEASE_S, Lease, PauseStatus
from areal_jax.rollout.http.wire import bodies
from areal_jax.rollout.http.wire.encoding import refuse
from areal_jax.rollout.http.wire.exchange import RequestError

_NAME = re.compile(r'[!-~]{1,200}')  # of a client
_SECONDS = re.compile(r'[0-9]{1,5}(\.[0-9]{1,9})?')


def read_client(name: str) -> str:
    """Reads the header CLIENT; '' = the client does not name itself."""
    if name and not _NAME.fullmatch(name):
        raise RequestError(CLIENT, f'{CLIENT} must be 1 to 200 ASCII characters without spaces')
    return name


def require_client(name: str) -> str:
    """Reads the header CLIENT of a call that only clients with a name may make."""
    if not name:
        raise RequestError(CLIENT, f'{CLIENT} is missing: send a name that no other client has')
    return read_client(name)


def read_seconds(text: str) -> float:
    """Reads the parameter lease_s; 0 if it is absent."""
    if text and not _SECONDS.fullmatch(text):
        raise refuse('lease_s', text, 'must be seconds, as 90 or 2.5')
    return float(text or 0)


def read_lease(client: str, seconds: float) -> Lease | None:
    """Reads the lease of a pause; None for a client that does not name itself, which has no lease."""
    if not client and not seconds:
        return None
    if not 0 < seconds <= LONGEST_LEASE_S:
        raise refuse('lease_s', seconds, f'must be above 0 and up to {LONGEST_LEASE_S:g} seconds')
    return Lease(require_client(client), seconds)


def render_pauses(pauses: Sequence[PauseStatus]) -> list[JsonObject]:
    """Renders pauses in the order in which they began: holder, seconds since then, and seconds left of the lease."""
    return [
        {
            'mode': pause.mode,
            'holder': pause.holder or None,
            'paused_seconds': round(pause.paused_s, 3),
            'lease_seconds': None if pause.left_s is None else round(pause.left_s, 3),
        }
        for pause in pauses
    ]


# Bodies in SGLang's form.


class Nothing(bodies.Body):
    """The body of a route without fields."""


class Abort(bodies.Body):
    """Ends a request, or all."""

    ignored = ('abort_message', 'finished_reason')
    rid: bodies.Text = ''
    abort_all: bool = False

    @pydantic.model_validator(mode='after')
    def require_name(self) -> Self:
        """Raises the error for a body that ends nothing."""
        if not self.abort_all and not self.rid:
            raise bodies.refusal('names no request: send one, or abort_all=true', field='rid')
        return self


class Pause(bodies.Body):
    mode: Literal['abort', 'retract', 'in_place'] = 'abort'


class Continue(bodies.Body):
    """Ends a pause."""

    ignored = ('torch_empty_cache',)


class UpdateFromDisk(bodies.Body):
    """Loads the weights of a directory and decodes with them."""

    ignored = ('torch_empty_cache', 'recapture_cuda_graph', 'token_step')
    unserved = ('is_async', 'keep_pause', 'manifest')  # a directory has its own manifest
    model_path: bodies.Name
    weight_version: bodies.Text = ''
    flush_cache: bool = True
    abort_all_requests: bool = False
    load_format: Literal['auto', 'safetensors'] = 'auto'


class NewVersion(bodies.Body):
    """Gives the same weights another version."""

    new_version: bodies.Name
    abort_all_requests: bool = False


# Bodies in vLLM's form.


class AbortRequests(bodies.Body):
    """Ends requests by their ids; without ids all."""

    request_ids: bodies.OneOrList[bodies.Spelled, bodies.Spelled] = Field([])


class WeightsPath(bodies.Body):
    weights_path: bodies.Name


class Update(bodies.Body):
    """The second phase of an update."""

    update_info: WeightsPath = bodies.OBJECT


class FinishUpdate(bodies.Body):
    """The third phase of an update; without a version it stays."""

    weight_version: bodies.Text = ''


class Rpc(bodies.Body):
    """A call of a method of workers: reload_weights."""

    ignored = ('timeout',)
    unserved = ('args',)
    method: Literal['reload_weights'] = 'reload_weights'
    kwargs: WeightsPath = bodies.OBJECT
