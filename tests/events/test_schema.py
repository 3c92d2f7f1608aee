"""The schema of the event log: its page, its lanes, and that every field is explained."""

import ast
import pathlib

from areal_jax import lanes
from areal_jax.events import schema as events
from tests import events_page

PACKAGE = pathlib.Path(events.__file__).parents[1]


def test_the_page_is_what_the_schema_gives():
    assert events_page.PAGE.read_text() == events_page.render(), 'run: python -m tests.events_page'


def test_every_kind_and_field_is_explained():
    for kind, record in events.KINDS.items():
        assert record.comment.endswith('.'), kind
        assert [field.name for field in record.fields if not field.comment] == ['kind'], kind
        assert events.HEADER.required < record.required, kind


def test_lanes_are_told_apart_by_their_names():
    names = [lanes.engine_lane(11), 'publish', lanes.publish_lane(0), lanes.LEARNER, lanes.REWARD, lanes.DISK]
    assert names == ['engine/11', 'publish', 'publish/0', 'learner', 'reward', 'disk']
    assert [lane for lane in names if lanes.is_engine_lane(lane)] == ['engine/11']
    assert [lane for lane in names if lanes.is_publish_lane(lane)] == ['publish', 'publish/0']
    assert not lanes.is_publish_lane('publisher')
    assert not lanes.is_engine_lane('engineer')


def literal_lanes(source):
    """Lanes that the source names by a string: the first argument of clock.run and clock.call, and 'engine/...'."""
    nodes = list(ast.walk(ast.parse(source)))
    calls = [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.args]
    on_clock = [n.args[0] for n in calls if n.func.attr in ('run', 'call') and 'clock' in ast.unparse(n.func.value)]
    named = [n for n in [*on_clock, *nodes] if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return sorted({n.value for n in named if n in on_clock or n.value.startswith('engine/')})


def test_lanes_are_named_by_the_schema_alone():
    found = {path.name: literal_lanes(path.read_text()) for path in PACKAGE.rglob('*.py') if path.name != 'lanes.py'}
    assert {name: lanes for name, lanes in found.items() if lanes} == {}
    assert literal_lanes("self._clock.run('disk', f, work); lane.startswith('engine/')") == ['disk', 'engine/']
