"""The names of lanes: a lane is a resource of the clock, and an event names its lane.

`engine/K` and `publish/K` are made by the functions below.
"""

import dataclasses

LEARNER, REWARD, DISK, PUBLISH = 'learner', 'reward', 'disk', 'publish'  # lanes
REGISTRY = 'registry'  # lane that reads the registry of servers
PREPARE = 'prepare'  # lane that compiles programs for another split of the devices
TOOL = 'tool'  # lane in which agents call their tools
PROGRAM = 'program'  # lane that waits for the next action of programs of episodes
EVALUATION_REWARD = 'reward/evaluation'  # lane that verifies answers of an evaluation during training
EVALUATION_WORK = ('evaluation_prefill', 'evaluation_decode', 'pin')  # kinds of work of such an evaluation


def engine_lane(index: int) -> str:
    """The lane in which one engine decodes; also the engine's name."""
    return f'engine/{index}'


def short_name(engine: str) -> str:
    """'0' of engine/0, for labels; other names stay as they are."""
    return engine.partition('/')[2] if is_engine_lane(engine) else engine


def publish_lane(index: int) -> str:
    """The lane in which one engine fetches weights."""
    return f'{PUBLISH}/{index}'


def wake_name(engine: str) -> str:
    """The event that wakes an idle engine of this process: a request, weights, a pause."""
    return f'{engine}: a request or weights'


def pinned_wake_name(engine: str) -> str:
    """The event that requests of a pinned version wait for in an engine: a request, weights, or their turn."""
    return f'{engine}: a request pinned to a version, or its turn'


def control_lane(index: int) -> str:
    """The lane of calls that control one server, separate so that they do not wait for a load of weights."""
    return f'control/{index}'


@dataclasses.dataclass(frozen=True)
class ServerLanes:
    """The lanes of one engine in another process."""

    engine: str  # also its name
    publish: str
    control: str


def server_lanes(index: int) -> ServerLanes:
    return ServerLanes(engine_lane(index), publish_lane(index), control_lane(index))


def evaluation_lanes(index: int) -> ServerLanes:
    """The lanes of an engine that only answers evaluations during training; training never waits for work in them."""
    return ServerLanes(f'evaluation/{index}', f'evaluation_publish/{index}', control_lane(index))


def lane_group(lane: str) -> str:
    """'engine' for every engine lane, 'publish' for every publish lane, else the lane itself."""
    return lane.split('/')[0]


def is_engine_lane(lane: str) -> bool:
    return lane_group(lane) == 'engine'


def is_upkeep_lane(lane: str) -> bool:
    """Whether the lane is for probes of servers, which never stop and so are no sign of progress."""
    return lane_group(lane) in (REGISTRY, 'control')


def is_publish_lane(lane: str) -> bool:
    """Whether the lane transfers new weights or is one in which engines fetch them."""
    return lane_group(lane) == PUBLISH
