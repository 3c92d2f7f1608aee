"""docs/events.md, made from the schema of the event log: `python -m tests.events_page` writes it."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable

from areal_jax import lanes
from areal_jax.events import schema as events
from areal_jax.events.records import Field

PAGE = pathlib.Path(__file__).parent.parent / 'docs' / 'events.md'
_HEAD = f"""# The event log

`{events.FILE}` in the workdir has one JSON object a line. This page is made from `areal_jax/events/schema.py` by
`python -m tests.events_page`; the schema has version {events.VERSION}.

A log without the event `log` has version 1: each start of the program counts its runs from 0 there. Kinds and optional
fields may be added, which raises the version; nothing that is listed here is ever changed.

What comes from outside is cut where it enters: a text to 2,000 characters, the reply of a scorer to 64 KiB, the result
of a tool to `agent.tool_bytes`, the outcome of an environment to 64 KiB. A call of a program is here with what no
earlier call has said, up to 64 bytes a token of `rollout.context_tokens` (at least 64 KiB); a longer one fits in no
context, gets no turn and is a short line with its size.

Lanes: `{lanes.engine_lane(0)}` and so on (decoding), `{lanes.LEARNER}`, `{lanes.REWARD}` (verification),
`{lanes.PUBLISH}` and `{lanes.publish_lane(0)}` and so on (transfer and fetching of weights), `{lanes.DISK}`
(checkpoints).
"""


def render() -> str:
    parts = [_HEAD, '## Every event', '', *_rows(events.HEADER.fields)]
    parts[-1] += '\n| `kind` | str | which of the kinds below |\n'
    for kind, record in events.KINDS.items():
        own = [field for field in record.fields if field.name not in events.HEADER.allowed | {'kind'}]
        parts += [f'## {kind}', '', record.comment, '', *_rows(own), '']
    return '\n'.join(parts).rstrip() + '\n'


def _rows(fields: Iterable[Field]) -> list[str]:
    rows = [f'| `{f.name}` | {f.type_name}{", optional" if f.optional else ""} | {f.comment} |' for f in fields]
    return ['| field | type | meaning |', '| --- | --- | --- |', *rows]


if __name__ == '__main__':
    PAGE.write_text(render())
