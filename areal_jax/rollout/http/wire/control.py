"""The readers of the control routes, in SGLang's and in vLLM's form, and the rendering of pauses.

All readers raise RequestError.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from areal_jax.files import JsonObject
from areal_jax.rollout.http.pauses import CLIENT, LONGEST_LEASE_S, Lease, PauseStatus
from areal_jax.rollout.http.wire.exchange import RequestError
from areal_jax.rollout.http.wire.request_fields import Fields, refuse

_SGLANG_PAUSES = ('abort', 'retract', 'in_place')
_UPDATE_UNSERVED = ('is_async', 'keep_pause', 'manifest')  # a directory has its own manifest
_UPDATE_IGNORED = ('torch_empty_cache', 'recapture_cuda_graph', 'token_step')
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


def read_nothing(fields: Fields) -> None:
    fields.finish()


def read_abort(fields: Fields) -> str:
    """Reads the id of a request; '' = all requests."""
    name, every = fields.take_text('rid'), fields.take_flag('abort_all')
    fields.take_ignored('abort_message', 'finished_reason')
    fields.finish()
    if not every and not name:
        raise RequestError('rid', "rid='' names no request: send one, or abort_all=true")
    return '' if every else name


def read_pause(fields: Fields) -> str:
    """Reads SGLang's pause mode."""
    mode = fields.take_choice('mode', _SGLANG_PAUSES, 'abort')
    fields.finish()
    return mode


def read_continue(fields: Fields) -> None:
    fields.take_ignored('torch_empty_cache')
    fields.finish()


def read_update_from_disk(fields: Fields) -> tuple[str, str | None, bool, bool]:
    """Returns (directory, weight version, whether the cache is flushed, whether open requests are ended)."""
    path, label = fields.take_text('model_path'), fields.take_text('weight_version') or None
    flush, cancel = fields.take_flag('flush_cache', default=True), fields.take_flag('abort_all_requests')
    fields.take_choice('load_format', ('auto', 'safetensors'))
    fields.take_unserved(*_UPDATE_UNSERVED)
    fields.take_ignored(*_UPDATE_IGNORED)
    fields.finish()
    if not path:
        raise RequestError('model_path', "model_path='' names no directory: send one")
    return path, label, flush, cancel


def read_new_version(fields: Fields) -> tuple[str, bool]:
    """Returns (weight version, whether open requests are ended)."""
    label, cancel = fields.take_text('new_version'), fields.take_flag('abort_all_requests')
    fields.finish()
    if not label:
        raise RequestError('new_version', "new_version='' is no version: send a string that names one")
    return label, cancel


def read_abort_ids(fields: Fields) -> tuple[str, ...]:
    """Reads ids of requests; () = all requests."""
    given = fields.take_texts('request_ids')
    fields.finish()
    return given


def read_update(fields: Fields) -> str:
    """Reads the directory of vLLM's second phase."""
    info = fields.take_fields('update_info')
    path = info.take_text('weights_path')
    info.finish()
    fields.finish()
    if not path:
        raise RequestError('update_info.weights_path', "update_info.weights_path='' names no directory: send one")
    return path


def read_finish(fields: Fields) -> str | None:
    """Reads the weight version; None = unchanged."""
    label = fields.take_text('weight_version') or None
    fields.finish()
    return label


def read_rpc(fields: Fields) -> str:
    """Reads the directory of vLLM's reload_weights."""
    method = fields.take_choice('method', ('reload_weights',), 'reload_weights')
    inside = fields.take_fields('kwargs')
    path = inside.take_text('weights_path')
    inside.finish()
    fields.take_unserved('args')
    fields.take_ignored('timeout')
    fields.finish()
    if not path:
        raise RequestError('kwargs.weights_path', f'kwargs.weights_path={path!r}: {method} needs a directory')
    return path
