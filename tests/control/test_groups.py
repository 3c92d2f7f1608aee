"""Restored groups: every open episode goes on, also one that had no request when the state was saved."""

import numpy as np

from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.episode import Episode, RunningGroup
from areal_jax.control.event_writer import EventLog
from areal_jax.control.groups import RunningGroups
from areal_jax.control.supervisor import Supervisor
from areal_jax.types import Prompt, Segment, Verdict


class Recorder:
    """A workflow and a verifier that finish at once, and note who was started."""

    def __init__(self):
        self.started = []

    async def run(self, prompt, episode):
        self.started.append((prompt.draw, episode.sample))
        episode.append(Segment(np.array([1], np.int32), np.zeros(1, np.float32), 0))
        episode.finish_reason = 'stop'

    async def verify(self, prompt, answer_tokens, finish_reason, describe_episode=None):
        return Verdict(1.0)


def test_open_episodes_without_a_request_go_on_after_those_with_one():
    clock, log, recorder, complete = VirtualClock({}, EventLog(), {}), EventLog(), Recorder(), []
    supervisor = Supervisor(clock)
    done = clock.event('both groups')

    def note(group):
        complete.append(group.prompt.draw)
        if len(complete) == 2:
            done.set()

    groups = RunningGroups(
        clock, log, supervisor, workflow=recorder, verifier=recorder, most_episodes=9, on_complete=note
    )
    first, second = (
        RunningGroup(Prompt(draw, np.array([1], np.int32), 't', {}), 0.0, [Episode(sample) for sample in range(3)])
        for draw in (4, 5)
    )
    first.failed[1] = 'error'  # has ended
    # of (4, 0), (4, 2), (5, 0), (5, 1), (5, 2) two had a request in an engine; the others were between two turns
    groups.restore([first, second], [('engine/0', 5, 1), ('engine/0', 4, 2)])

    async def program():
        supervisor.start('groups', groups.collect())
        groups.resume()
        await clock.wait(done)

    clock.execute(supervisor.run(program()))
    assert recorder.started == [(5, 1), (4, 2), (4, 0), (5, 0), (5, 2)]
    assert sorted(complete) == [4, 5]
