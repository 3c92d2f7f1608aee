"""Events of devices that go from one part of a run to another; schema.py has all kinds."""

from typing import Annotated, Literal, NotRequired

from areal_jax.events.schema import Header


class ReallocateEvent(Header):
    """Devices went from generation to training, or back, before an update; seconds are of the clock."""

    kind: Literal['reallocate']
    update: Annotated[int, 'number of the first update with the new split']
    from_learner: Annotated[str, 'cluster.learner before']
    from_engines: Annotated[str, 'cluster.engines before']
    learner: Annotated[str, 'cluster.learner from now on']
    engines: Annotated[str, 'cluster.engines from now on']
    left: Annotated[list[str], 'engines that left']
    joined: Annotated[list[str], 'engines that joined']
    moved: Annotated[int, 'requests that went on elsewhere']
    busy_learner: Annotated[float, 'seconds of an update in which the learner was busy, mean since the move before']
    busy_engines: Annotated[float, 'likewise, of one engine']
    needed_engines: NotRequired[
        Annotated[
            float,
            'likewise, that one engine needs for what an update takes, as `auto` counts; from version 14 of the log on',
        ]
    ]
    period: Annotated[float, 'likewise, seconds of an update']
    wait_seconds: Annotated[float, 'for the publication of the update before, and for programs not yet compiled']
    leave_seconds: Annotated[float, 'for dispatches of the engines that left']
    learner_seconds: Annotated[float, 'in which weights and optimizer state moved']
    join_seconds: Annotated[float, 'in which the engines that joined were built']
    seconds: Annotated[float, 'of the whole move, in which nothing trains; engines that stay go on']
