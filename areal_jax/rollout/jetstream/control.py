"""The second service of a server, for actions that JetStream's service lacks. Names and encoding, for both sides.

Messages are JSON objects as UTF-8, because they have few fields, and so that neither side needs code generated for its
version of protobuf. Only `Record` answers bytes, see record.py.
"""

from __future__ import annotations

import json

from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire.encoding import load_json
from areal_jax.rollout.http.wire.exchange import ReplyError
from areal_jax.rollout.http.wire.reply import Reply

SERVICE = 'areal_jax.EngineControl'
PAUSE, RESUME, STAGE, SWAP, STATUS, ABORT, FLUSH, RECORD, REGISTER, RENEW = (
    'Pause', 'Resume', 'Stage', 'Swap', 'Status', 'Abort', 'FlushCache', 'Record', 'RegisterClient', 'RenewPause',
)  # fmt: skip


def describe_path(method: str) -> str:
    """Returns the path of a method, as in '/areal_jax.EngineControl/Pause'."""
    return f'/{SERVICE}/{method}'


def encode(fields: JsonObject) -> bytes:
    return json.dumps(fields, separators=(',', ':')).encode()


def decode(message: bytes) -> JsonObject:
    """Decodes the fields of a reply; {} if it is no JSON object."""
    try:
        return Reply(load_json(message)).values
    except ReplyError:
        return {}
