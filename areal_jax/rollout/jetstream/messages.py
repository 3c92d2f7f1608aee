"""JetStream's messages, without JetStream: DecodeRequest and DecodeResponse.

Clients have no JetStream in their interpreter, nor does the process that parses large messages of a server. Fields and
numbers are as in jetstream/core/proto/jetstream.proto of google-jetstream 0.2.2 (third_party/jetstream). They are
declared in a separate pool, not in protobuf's default pool, where JetStream, if imported too, declares the same names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = 'jetstream_proto'
SERVICE = f'{PACKAGE}.Orchestrator'
DECODE = f'/{SERVICE}/Decode'
_INT32, _STRING, _MESSAGE = (
    descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
    descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE,
)
_OF_STREAM = 'DecodeResponse.StreamContent'
_CHOICES = {'DecodeRequest': ('content', ('text_content', 'token_content'))}  # a oneof: the last one sent counts
# message: field: (number, type, name of the message, repeated). Fields that this project does not use are left out
_FIELDS: Mapping[str, Mapping[str, tuple[int, int, str, bool]]] = {
    'DecodeRequest': {
        'max_tokens': (4, _INT32, '', False),
        'text_content': (5, _MESSAGE, 'DecodeRequest.TextContent', False),
        'token_content': (6, _MESSAGE, 'DecodeRequest.TokenContent', False),
    },
    'DecodeRequest.TextContent': {'text': (1, _STRING, '', False)},
    'DecodeRequest.TokenContent': {'token_ids': (1, _INT32, '', True)},
    'DecodeResponse': {'stream_content': (3, _MESSAGE, _OF_STREAM, False)},
    _OF_STREAM: {'samples': (1, _MESSAGE, f'{_OF_STREAM}.Sample', True)},
    f'{_OF_STREAM}.Sample': {'text': (1, _STRING, '', False), 'token_ids': (2, _INT32, '', True)},
}


def _declare() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name='jetstream.proto', package=PACKAGE, syntax='proto3')
    messages: dict[str, descriptor_pb2.DescriptorProto] = {}
    for path, fields in _FIELDS.items():
        outer, _, name = path.rpartition('.')
        messages[path] = (messages[outer].nested_type if outer else file.message_type).add(name=name)
        for field, (number, kind, message, repeated) in fields.items():
            label = 'LABEL_REPEATED' if repeated else 'LABEL_OPTIONAL'
            messages[path].field.add(
                name=field, number=number, type=kind,  # type: ignore[arg-type]
                label=descriptor_pb2.FieldDescriptorProto.Label.Value(label),
                type_name=f'.{PACKAGE}.{message}' if message else None,
            )  # fmt: skip
        if path in _CHOICES:
            choice, members = _CHOICES[path]
            messages[path].oneof_decl.add(name=choice)
            for member in messages[path].field:
                if member.name in members:
                    member.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


_POOL = _declare()
_Request, _Response = (
    message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f'{PACKAGE}.{name}'))
    for name in ('DecodeRequest', 'DecodeResponse')
)


def render_decode(token_ids: Sequence[int], max_tokens: int) -> bytes:
    """Encodes a DecodeRequest for up to `max_tokens` tokens after the prompt."""
    return _Request(max_tokens=max_tokens, token_content={'token_ids': token_ids}).SerializeToString()


def parse_request(message: bytes) -> Any:
    """Decodes a DecodeRequest, with JetStream's names of fields.

    Raises google.protobuf.message.DecodeError for other bytes.
    """
    return _Request.FromString(message)


def parse_decode(message: bytes) -> np.ndarray:
    """Decodes the ids, int32 [n], in a DecodeResponse to a call of one sample.

    Raises google.protobuf.message.DecodeError for other bytes.
    """
    samples = _Response.FromString(message).stream_content.samples
    return np.array(samples[0].token_ids if samples else [], np.int32)
