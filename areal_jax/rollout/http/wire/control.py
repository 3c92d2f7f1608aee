"""What the routes that control a server read, in the words of SGLang and of vLLM, and what they say of pauses.

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
_UPDATE_IGNORED = (
    'load_format', 'is_async', 'torch_empty_cache', 'keep_pause', 'recapture_cuda_graph', 'token_step', 'manifest',
)  # fmt: skip
_NAME = re.compile(r'[!-~]{1,200}')  # of a client
_SECONDS = re.compile(r'[0-9]{1,5}(\.[0-9]{1,9})?')


def read_client(name: str) -> str:
    """The header CLIENT; '' = the client does not name itself."""
    if name and not _NAME.fullmatch(name):
        raise RequestError(CLIENT, f'{CLIENT} must be 1 to 200 ASCII characters without spaces')
    return name


def require_client(name: str) -> str:
    """The header of a call that only clients that name themselves may send."""
    if not name:
        raise RequestError(CLIENT, f'{CLIENT} is missing: send a name that no other client has')
    return read_client(name)


def read_seconds(text: str) -> float:
    """The parameter lease_s; 0 where it is absent."""
    if text and not _SECONDS.fullmatch(text):
        raise refuse('lease_s', text, 'must be seconds, as 90 or 2.5')
    return float(text or 0)


def read_lease(client: str, seconds: float) -> Lease | None:
    """The lease of a pause; None for a client that does not name itself, which has none."""
    if not client and not seconds:
        return None
    if not 0 < seconds <= LONGEST_LEASE_S:
        raise refuse('lease_s', seconds, f'must be above 0 and up to {LONGEST_LEASE_S:g} seconds')
    return Lease(require_client(client), seconds)


def render_pauses(pauses: Sequence[PauseStatus]) -> list[JsonObject]:
    """Who has paused, in the order in which the pauses began: seconds since then, and those that the lease lasts."""
    return [
        {
            'mode': pause.mode,
            'holder': pause.holder or None,
            'paused_seconds': round(pause.paused_s, 3),
            'lease_seconds': None if pause.left_s is None else round(pause.left_s, 3),
        }
        for pause in pauses
    ]


def read_nothing(body: object) -> None:
    Fields(body).finish()


def read_abort(body: object) -> str:
    """The id of a request; '' = all of them."""
    fields = Fields(body)
    name, every = fields.take_text('rid'), fields.take_flag('abort_all')
    fields.take_ignored('abort_message', 'finished_reason')
    fields.finish()
    if not every and not name:
        raise RequestError('rid', "rid='' names no request: send one, or abort_all=true")
    return '' if every else name


def read_pause(body: object) -> str:
    """SGLang's mode."""
    fields = Fields(body)
    mode = fields.take_choice('mode', _SGLANG_PAUSES, 'abort')
    fields.finish()
    return mode


def read_continue(body: object) -> None:
    fields = Fields(body)
    fields.take_ignored('torch_empty_cache')
    fields.finish()


def read_update_from_disk(body: object) -> tuple[str, str | None, bool, bool]:
    """(directory, weight version, whether the cache is flushed, whether open requests are ended)."""
    fields = Fields(body)
    path, label = fields.take_text('model_path'), fields.take_text('weight_version') or None
    flush, cancel = fields.take_flag('flush_cache', default=True), fields.take_flag('abort_all_requests')
    fields.take_ignored(*_UPDATE_IGNORED)
    fields.finish()
    if not path:
        raise RequestError('model_path', "model_path='' names no directory: send one")
    return path, label, flush, cancel


def read_new_version(body: object) -> tuple[str, bool]:
    """(weight version, whether open requests are ended)."""
    fields = Fields(body)
    label, cancel = fields.take_text('new_version'), fields.take_flag('abort_all_requests')
    fields.finish()
    if not label:
        raise RequestError('new_version', "new_version='' is no version: send a string that names one")
    return label, cancel


def read_abort_ids(body: object) -> tuple[str, ...]:
    """Ids of requests; () = all of them."""
    fields = Fields(body)
    given = fields.take_texts('request_ids')
    fields.finish()
    return given


def read_update(body: object) -> str:
    """The directory of vLLM's second phase."""
    fields = Fields(body)
    info = fields.take_fields('update_info')
    path = info.take_text('weights_path')
    info.finish()
    fields.finish()
    if not path:
        raise RequestError('update_info.weights_path', "update_info.weights_path='' names no directory: send one")
    return path


def read_finish(body: object) -> str | None:
    """The weight version; None = unchanged."""
    fields = Fields(body)
    label = fields.take_text('weight_version') or None
    fields.finish()
    return label


def read_rpc(body: object) -> str:
    """The directory for vLLM's reload_weights."""
    fields = Fields(body)
    method = fields.take_choice('method', ('reload_weights',), 'reload_weights')
    path = fields.take_fields('kwargs').take_text('weights_path')
    fields.take_ignored('timeout', 'args')
    if not path:
        raise RequestError('kwargs.weights_path', f'kwargs.weights_path={path!r}: {method} needs a directory')
    return path
