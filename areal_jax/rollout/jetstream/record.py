"""Data without fields in JetStream's messages: settings of a call; log-probs, versions and columns of an answer.

Settings are sent as metadata of the call: the body of `POST /inference/v1/generate` (http/wire/vllm.py) without the
token ids and max_tokens, which JetStream's message has. The record of an answer returns as trailing metadata. gRPC
bounds metadata, so a longer record is kept by the server and fetched by the id of the request. A JetStream client that
knows neither gets its tokens only.
"""

from __future__ import annotations

import collections
import json
import struct
from collections.abc import Sequence

import numpy as np

from areal_jax.columns import find
from areal_jax.errors import show
from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire import vllm
from areal_jax.rollout.http.wire.encoding import load_json, parse_json, refuse
from areal_jax.rollout.http.wire.exchange import Answer, Call, FinishWord, Piece, ReplyError
from areal_jax.rollout.http.wire.reply import Reply, cut_by_spans
from areal_jax.types import LARGEST_LOGPROB

SETTINGS = 'areal-call'  # metadata of a call; its value is ASCII
RECORD = 'areal-answer-bin'  # trailing metadata: the record
KEPT = 'areal-answer-kept'  # trailing metadata: the record is fetched by this id of the request
# bytes of a record in trailing metadata. gRPC takes 8 kB of metadata unless a channel sets another limit, and binary
# values are sent as base64, 4 characters for 3 bytes
LARGEST_TRAILER = 5500
_LENGTH = struct.Struct('<I')  # of the header


def render_settings(call: Call) -> str:
    """Renders the metadata of a call with one prompt of token ids."""
    body = vllm.render_request(call)
    del body['token_ids'], body['sampling_params']['max_tokens']  # JetStream's message has them
    return json.dumps(body, separators=(',', ':'))


def read_settings(metadata: str | None, token_ids: Sequence[int], max_tokens: int) -> JsonObject:
    """Returns a body for vllm.parse; without metadata, for the greedy answer.

    Raises RequestError for metadata that is no JSON object.
    """
    body = {'sampling_params': {'temperature': 0.0}} if metadata is None else parse_json(metadata.encode())
    parameters = body.get('sampling_params', {}) if isinstance(body, dict) else None
    if not isinstance(body, dict) or not isinstance(parameters, dict):
        raise refuse(SETTINGS, body, 'must be a JSON object in whose sampling_params is one')
    return {**body, 'stream': True, 'token_ids': token_ids, 'sampling_params': {**parameters, 'max_tokens': max_tokens}}


def encode_record(call: Call, answer: Answer) -> bytes:
    """Encodes an answer without its tokens: 4 bytes with the length of the header, the header, and the arrays.

    The arrays are the log-probs, float32 [n], and each column that the call wants, [n, *shape] of its dtype.
    """
    assert answer.finish is not None
    header = {
        'finish_reason': answer.finish.reason,
        'stop_reason': vllm.stop_reason(call, answer),
        'version': answer.version,
        'cached_tokens': answer.cached_tokens,
        'retractions': answer.retractions,
        'weight_versions': [{'version': span.version, 'start': span.start, 'end': span.end} for span in answer.spans],
    }
    text = json.dumps(header, separators=(',', ':')).encode()
    arrays = [answer.logprobs, *(answer.column(find(name)) for name in call.columns)]
    parts = [array.astype(_little(array.dtype)).tobytes() for array in arrays]
    return b''.join([_LENGTH.pack(len(text)), text, *parts])


def decode_record(
    record: bytes, tokens: np.ndarray, columns: Sequence[str], vocab_size: int
) -> tuple[list[Piece], FinishWord, str]:
    """Returns (the answer's pieces by version, its finish reason, the version in use then); `tokens` are int32 [n].

    Raises ReplyError if record and tokens do not fit, or if a log-prob is invalid.
    """
    header, arrays = _split(record)
    length = len(tokens)
    if length and not (tokens.min() >= 0 and tokens.max() < vocab_size):
        raise header.error('token_ids', f'a token outside of the vocabulary of {vocab_size}: {tokens.tolist()[:8]}')
    logprobs, arrays = _take(header, arrays, 'logprobs', np.dtype(np.float32), (length,))
    found: dict[str, np.ndarray] = {}
    for name in columns:
        column = find(name)
        assert column.shape is not None, 'JetStream serves no columns of the model'
        found[name], arrays = _take(header, arrays, name, np.dtype(column.dtype), (length, *column.shape))
    if arrays:
        raise header.error('logprobs', f'{len(arrays)} bytes more than {length} tokens need')
    for name, values in (('logprobs', logprobs), *((n, v) for n, v in found.items() if find(n).is_logprob)):
        if not np.all((values > -np.inf) & (values <= LARGEST_LOGPROB)):
            raise header.error(name, 'a value that no log-prob can have')
    pieces = cut_by_spans(header, tokens, logprobs, found) if length else []
    return pieces, _read_finish(header), header.text('version')


def _split(record: bytes) -> tuple[Reply, bytes]:
    try:
        (length,) = _LENGTH.unpack_from(record)
        header = load_json(record[_LENGTH.size : _LENGTH.size + length])
    except (struct.error, ReplyError) as error:
        raise ReplyError(f'the record of an answer has no header ({error}): the reply is not used') from error
    return Reply(header, 'record'), record[_LENGTH.size + length :]


def _take(header: Reply, data: bytes, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> tuple[np.ndarray, bytes]:
    size = int(np.prod(shape)) * dtype.itemsize
    if len(data) < size:
        raise header.error(name, f'{len(data)} bytes, and {shape[0]} tokens need {size}')
    array = np.frombuffer(data[:size], _little(dtype)).astype(dtype).reshape(shape)
    return array, data[size:]


def _little(dtype: np.dtype) -> np.dtype:
    return dtype.newbyteorder('<')


def _read_finish(header: Reply) -> FinishWord:
    reason = header.values.get('finish_reason')
    if reason == 'stop' or reason == 'length' or reason == 'abort':
        return reason
    raise header.error('finish_reason', f'{show(reason)}, which is none of stop, length and abort')


MOST_BYTES = 64 << 20  # of all records; the oldest are forgotten above


class KeptRecords:
    """Records by the id of their request; the last one is kept whatever its length."""

    def __init__(self, most_bytes: int = MOST_BYTES):
        self._most, self._bytes = most_bytes, 0
        self._records: collections.OrderedDict[str, bytes] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def keep(self, request_id: str, record: bytes) -> None:
        self.take(request_id)
        self._records[request_id] = record
        self._bytes += len(record)
        while self._bytes > self._most and len(self._records) > 1:
            self.take(next(iter(self._records)))

    def take(self, request_id: str) -> bytes:
        """Removes and returns the record of an id; b'' without one."""
        record = self._records.pop(request_id, b'')
        self._bytes -= len(record)
        return record
