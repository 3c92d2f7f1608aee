"""Events of engines of one class, which differ from the others in their hardware; schema.py has all kinds."""

from typing import Annotated, Literal

from areal_jax.events.schema import Header, PolicyVersion


class SpareEvent(Header):
    """The engines of a class get no new requests from now on, or get them again; from version 14 of the log on."""

    kind: Literal['spare']
    mode: Annotated[Literal['start', 'done'], 'which end of it']
    hardware: Annotated[str, 'of the class, as `join` tells it']
    engines: Annotated[list[str], 'of the class']
    version: PolicyVersion
    open: Annotated[float, 'open answers of the whole pool, mean since the publication before']
    slots: Annotated[int, 'decoding slots of the engines that get requests without the class']
    speed: Annotated[float, 'tokens a second of an open answer on the class, as a share of the fastest class']
    update_seconds: Annotated[float, 'between two publications, mean of the last ones']
    reason: Annotated[str, 'fits: the slots of the others held all answers; full, slower: they do not, or no longer']
