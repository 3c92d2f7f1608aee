"""Headers that lie: a JSON value in which one part after the other is replaced by what no writer writes there."""

import json

DEEP = '[' * 20_000 + ']' * 20_000
LIES = (
    'null', 'true', '-1', '1.5', '1e999', '-1e999', 'NaN', f'{2**70}', f'{-(2**70)}', '9' * 5000, '""', '"x"',
    '"\\ud800"', '[]', '[[]]', '{}', '[1, "a"]', DEEP,
)  # fmt: skip
_PLACE = '"the place of a lie"'


def list_lies(value):
    """The bytes of every such header; also cut ones, and the lies alone."""
    for path in _list_paths(value):
        text = json.dumps(_replace(value, path))
        yield from (text.replace(_PLACE, lie).encode() for lie in LIES)
    text = json.dumps(value).encode()
    yield from (text[:-1], text[: len(text) // 2], text + b'}', b'', b'\xff', *(lie.encode() for lie in LIES))


def _list_paths(value, path=()):
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*path, key)
        yield from _list_paths(inner, (*path, key))


def _replace(value, path):
    if not path:
        return json.loads(_PLACE)
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _replace(value[path[0]], path[1:])
    return copy
