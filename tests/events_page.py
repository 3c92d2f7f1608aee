"""docs/events.md, made from the schema of the event log: `python -m tests.events_page` writes it."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable

from areal_jax import lanes
from areal_jax.events import schema as events
from areal_jax.events.records import Field

PAGE = pathlib.Path(__file__).parent.parent / 'docs' / 'events.md'
_HEAD = f"""# The event log

After this page you can read what happened in a run, event by event: `{events.FILE}` in the workdir has one JSON object
a line, and `areal-check-log WORKDIR/{events.FILE}` checks it. The page is made from `areal_jax/events/schema.py` by
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

_RULES = """## What areal-check-log holds

`areal_jax/report/rules/` has the rules; those of requests, engines, servers and work hold for logs from version 6 on.
Each is checked at every line, and the first line that breaks one is named, with the field and its value.

| events | what holds |
| --- | --- |
| every event | `seq` has no gaps, `time` never goes back, `check` fits the other fields |
| `log`, `save`, `restore`, `signal` | {starts} |
| `draw`, `admit` | {admission} |
| `route`, `arrive` | {routes} |
| `move`, `leave` | {moves} |
| `receive` | {calls} |
| `prefill`, `decode`, `preempt` | {dispatches} |
| `decode`, `finish` | {tokens} |
| `interrupt`, `load` | {loads} |
| `register`, `engine_state`, `join`, `fence`, `probe`, `stage` | {servers} |
| `spare`, `reallocate` | {devices} |
| `run_start`, `run_done` | {runs} |
| `finish`, `reward`, `check`, `audit` | {rewards} |
| `buffer`, `drop`, `consume` | {groups} |
| `friction` | {frictions} |
| `evaluate`, `evaluation_*` | {evaluations} |
""".format(
    starts='a start is the first line or follows a `save`, where the log was cut off, and tells with `restore` where '
    'it goes on before anything moves; a `save` is of the update that is trained and published; after a signal no draw '
    'is taken and no batch formed',
    admission='draws come in the order of the stream; Eq. 3, `rollout.max_running_groups`, `buffer.capacity`, '
    '`run.steps`; fewer answers are `open` than are `wanted`',
    routes='a request of a running draw goes to an engine that is in the pool, serves and is not left out, while no '
    'other has it; it arrives there once, on no other engine, and nothing arrives that was not sent; in this process '
    'in the next line; a server that is dead never queues it',
    moves='a request moves away from the engine that has it, with all its tokens (in this process those of its '
    'dispatches), as often as engines failed it; only then it is sent elsewhere',
    calls='a call ends on an engine that queued the request; an answer that never moved has the tokens that its calls '
    'brought',
    dispatches='each request once, at most as many as `bucket`, 1 to `steps` tokens a row, as many slots as before, on '
    'the engine that has the request; a preempted one has the tokens of its prompt and of its answer so far',
    tokens='in this process each token of an answer is of a dispatch, and each token of a dispatch in an answer, by '
    'version; a KV cache is computed under the version that decodes with it, again after an interruption, and not '
    'otherwise',
    loads='an interruption is for another version, in order for a newer one, which is loaded next; a version is loaded '
    'after its `publish`, in this process after the lane of the engine has fetched it',
    servers='a server is registered with a higher `incarnation` each time; its states follow one another as the pool '
    'lets them; it joins after a `fence` where it was out of service, and after a probe that it passed where it is '
    'probed; it loads what it has staged, swapped in and acknowledged',
    devices='a class is left out once and taken back once; engines that are said to have left or joined did',
    runs='each number once; a run ends as it began, not before it was asked for, not after its line; an update is '
    'trained once, after its batch was formed, then copied, then transferred, then published',
    rewards="each answer ends once, is scored once after that, and told of once after that; what the verifier's worker "
    'said is the reward (an attempt is a call, or the start of a worker that died before its call); each of the '
    "`attempts` was asked for, and is 1 with `task.verifier='inline'`; labels are known",
    groups='each draw is in one state and moves forward; a group is trained once, the lowest draws first, with the '
    'rewards that were given; a drop has a known reason that its answers bear out; with `staleness.over_age=drop` no '
    'group beyond `staleness.max_token_age` is trained, and none within it dropped',
    frictions='one of a reward is of an answer of the last batch, and begins with the reward that it got; one of the '
    'actor comes before the answer ends',
    evaluations='evaluations begin and end in turn; dispatches and ends are of the version that is evaluated',
)


def render() -> str:
    parts = [_HEAD, _RULES, '## Every event', '', *_rows(events.HEADER.fields)]
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
