"""The bodies of the routes that control a server, in the words of SGLang and of vLLM. All raise RequestError."""

from __future__ import annotations

from areal_jax.rollout.http.wire.exchange import RequestError
from areal_jax.rollout.http.wire.request_fields import Fields

_SGLANG_PAUSES = ('abort', 'retract', 'in_place')
_UPDATE_IGNORED = (
    'load_format', 'is_async', 'torch_empty_cache', 'keep_pause', 'recapture_cuda_graph', 'token_step', 'manifest',
)  # fmt: skip


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
