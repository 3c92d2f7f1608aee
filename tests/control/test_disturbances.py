"""Frictions in the loop: what is logged and counted, and whose engine an answer counts for."""

from __future__ import annotations

import numpy as np

from areal_jax.control.episode import Episode, Row
from areal_jax.control.event_writer import EventLog, check_types
from areal_jax.control.frictions import ENGINE, Disturbances, Frictions
from areal_jax.types import Segment
from tests.control.test_frictions import group


def log_of(tmp_path):
    log = EventLog(tmp_path / 'events.jsonl', 0, 0)
    seen = []
    log.listeners += [check_types, seen.append]
    return log, seen


def episode(sample):
    segment = Segment(np.array([5, 6], np.int32), np.array([-1.0, -2.0], np.float32), 0)
    return Episode(sample, 'stop', 'a', [Row(segments=[segment])])


def test_a_disturbed_answer_is_no_answer_of_its_engine(tmp_path):
    for actor, engine in (('constant', ENGINE), ('logprobs', ENGINE), ('temperature', 'a')):
        log, seen = log_of(tmp_path)
        answer = episode(0)
        Disturbances(Frictions(seed=0, actor=actor, actor_share=1.0), log).disturb_answer(7, answer)
        assert answer.engine == engine
        [event] = [event for event in seen if event['kind'] == 'friction']
        assert (event['draw'], event['friction'], event['before']) == (7, actor, [-1.0, -2.0])
        assert ('tokens' in event) == (actor == 'constant')
        log.close()


def test_a_batch_is_counted_and_its_changes_are_logged(tmp_path):
    log, seen = log_of(tmp_path)
    frictions = Frictions(seed=0, reward_share=1.0)
    disturbed, metrics = Disturbances(frictions, log).disturb_batch([group(0, [0.0, 1.0]), group(3, [0.5])])
    assert metrics == {'actor': 0.0, 'reward': 3.0, 'unrewarded': 0.0, 'policy_reward': 0.5}
    logged = {(event['draw'], event['sample']): event['after'] for event in seen if event['kind'] == 'friction'}
    assert logged == {(g.draw, t.sample): [t.reward] for g in disturbed for t in g.trajectories}
    log.close()
