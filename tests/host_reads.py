"""Reads by the host of arrays over several devices. jax's transfer guards do not see them on CPU devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from jax._src.array import ArrayImpl


@contextlib.contextmanager
def record_reads() -> Iterator[list[tuple[int, ...]]]:
    """The shapes of the sharded arrays whose values the host asks for: by numpy, device_get, or inside jax.

    A read of an array on one CPU device is not seen: numpy takes its buffer.
    """
    shapes: list[tuple[int, ...]] = []
    read = ArrayImpl._value.fget

    def note(array):
        shapes.append(array.shape)
        return read(array)

    with mock.patch.object(ArrayImpl, '_value', property(note)):
        yield shapes
