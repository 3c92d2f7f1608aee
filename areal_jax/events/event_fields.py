"""The fields that kinds of events share: what the schema in schema.py and schema.py is made of."""

from typing import Annotated, TypedDict

Draw = Annotated[int, 'number of the draw: the position of the prompt in the stream, unique in the run']
Sample = Annotated[int, 'index of the answer in its group, from 0']
Request = Annotated[str, 'SEED/DRAW/SAMPLE']
Engine = Annotated[str, 'name of the engine']
Update = Annotated[int, 'number of the update, from 1; the policy version that it makes']
PolicyVersion = Annotated[int, 'policy version; 0 are the weights that the run starts from']
RunNumber = Annotated[int, 'number of the run on a lane, in the order of requests, unique in the log since version 2']
WorkKind = Annotated[
    str,
    'kind of work: decode, prefill, train, snapshot, publish, load, reward, save; beside training evaluation_decode, '
    'evaluation_prefill, pin; with a server of others generate and control; of agents tool; of another split of the '
    'devices compile and reshard',
]
Check = Annotated[
    int, 'CRC-32 of the other fields as JSON with sorted keys; of the real clock, from version 6 of the log on'
]
Pause = Annotated[float, 'clock seconds without decoding, the rebuild of KV caches before the next dispatch included']
Amount = Annotated[float, 'amount of work in the unit of its kind: tokens, steps, calls']


class Header(TypedDict):
    """What every event has."""

    seq: Annotated[int, 'number of the event, from 0, without gaps; a resumed run goes on from its checkpoint']
    time: Annotated[float, 'clock seconds: when the clock released the last completion']
    lane: Annotated[str | None, 'lane or engine that the event belongs to; null for the loop itself']
