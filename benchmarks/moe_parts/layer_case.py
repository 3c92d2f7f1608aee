"""One layer of experts with its router, for all sides: sizes, weights and tokens. numpy only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

FORWARD, GRADIENT = PASSES = 'forward', 'gradient'
# E experts, k choices of a token, d model width, F width of an expert, T tokens
SIZES = {
    'A': {'experts': 128, 'choices': 8, 'd': 256, 'width': 128, 'tokens': 512},
    'B': {'experts': 32, 'choices': 4, 'd': 512, 'width': 256, 'tokens': 512},
    'small': {'experts': 8, 'choices': 2, 'd': 64, 'width': 48, 'tokens': 64},
}


def draw(sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """float32: x [T, d], router [d, E], gate and up [E, d, F], down [E, F, d], the same in every process."""
    rng = np.random.default_rng(0)
    experts, d, width = sizes['experts'], sizes['d'], sizes['width']
    shapes = {
        'x': (sizes['tokens'], d), 'router': (d, experts), 'gate': (experts, d, width), 'up': (experts, d, width),
        'down': (experts, width, d),
    }  # fmt: skip
    scale = lambda name, shape: 1.0 if name == 'x' else shape[-2] ** -0.5
    return {name: (rng.normal(size=shape) * scale(name, shape)).astype(np.float32) for name, shape in shapes.items()}


def draw_steps(sizes: Mapping[str, int], rows: int) -> dict[str, np.ndarray]:
    """`draw` with tokens of steps, x [steps, rows, d], each with a mean square of 1, as behind a norm."""
    inputs = draw(sizes)
    x = inputs['x'].astype(np.float64)
    x /= np.sqrt(np.square(x).mean(axis=-1, keepdims=True))
    return inputs | {'x': x.astype(np.float32).reshape(-1, rows, sizes['d'])}


def pin(arguments: Mapping[str, Any]) -> None:
    """To the core of the arguments, before threads are started."""
    os.sched_setaffinity(0, {arguments['core']})


def watch(run: Callable[[], float]) -> Callable[[], Mapping[str, float]]:
    """A side's call: the mean square that `run` returns, and its CPU seconds.

    The clock of sides.py counts the processes that a side started as well; looking for them takes 4 ms.
    """

    def call() -> Mapping[str, float]:
        began = time.process_time()
        square = run()
        return {'square': square, 'part_cpu_s': time.process_time() - began}

    return call
