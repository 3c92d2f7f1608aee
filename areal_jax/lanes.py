"""The names of lanes: a lane is a resource of the clock, and events name the lane that they belong to.

`engine/K` and `publish/K` are made by the functions below.
"""

import dataclasses

LEARNER, REWARD, DISK, PUBLISH = 'learner', 'reward', 'disk', 'publish'  # lanes
REGISTRY = 'registry'  # lane: the registry of servers is read in it
PREPARE = 'prepare'  # lane: programs for another split of the devices are compiled in it
TOOL = 'tool'  # lane: agents call their tools in it
PROGRAM = 'program'  # lane: what programs of episodes do next is waited for in it
EVALUATION_REWARD = 'reward/evaluation'  # lane: answers of an evaluation beside training are verified in it
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
    """The event that an engine in this process waits for, and that interrupts its rest: a request, weights, a pause."""
    return f'{engine}: a request or weights'


def pinned_wake_name(engine: str) -> str:
    """The event that its requests of a pinned version wait for: a request, weights, or their turn."""
    return f'{engine}: a request pinned to a version, or its turn'


def control_lane(index: int) -> str:
    """The lane of calls that control one server, which wait for no load of weights."""
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
    """Those of an engine that answers evaluations beside training alone: what training waits for is in none of them."""
    return ServerLanes(f'evaluation/{index}', f'evaluation_publish/{index}', control_lane(index))


def lane_group(lane: str) -> str:
    """'engine' for every engine lane, 'publish' for every publish lane, else the lane itself."""
    return lane.split('/')[0]


def is_engine_lane(lane: str) -> bool:
    return lane_group(lane) == 'engine'


def is_upkeep_lane(lane: str) -> bool:
    """True for lanes of looks at servers: they go on while nothing else happens, and so do not show that a run does."""
    return lane_group(lane) in (REGISTRY, 'control')


def is_publish_lane(lane: str) -> bool:
    """True for the lane that transfers new weights and for those in which engines fetch them."""
    return lane_group(lane) == PUBLISH
