"""The schema of the event log: its page, its lanes, and that every field is explained."""

from areal_jax import events
from tests import events_page


def test_the_page_is_what_the_schema_gives():
    assert events_page.PAGE.read_text() == events_page.render(), 'run: python -m tests.events_page'


def test_every_kind_and_field_is_explained():
    for kind, record in events.KINDS.items():
        assert record.comment.endswith('.'), kind
        assert [field.name for field in record.fields if not field.comment] == ['kind'], kind
        assert events.HEADER.required < record.required, kind


def test_lanes_are_told_apart_by_their_names():
    lanes = [events.engine_lane(11), 'publish', events.publish_lane(0), events.LEARNER, events.REWARD, events.DISK]
    assert lanes == ['engine/11', 'publish', 'publish/0', 'learner', 'reward', 'disk']
    assert [lane for lane in lanes if events.is_engine_lane(lane)] == ['engine/11']
    assert [lane for lane in lanes if events.is_publish_lane(lane)] == ['publish', 'publish/0']
    assert not events.is_publish_lane('publisher')
    assert not events.is_engine_lane('engineer')
