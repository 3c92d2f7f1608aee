"""Senders over shared memory that kill themselves, each in a forked child: argv = directory, moments...

The child of a moment sends through the segment `areal_jax-MOMENT.0.weights` of the directory.

created: before the first record; header: version 1 has its prefix, and no part; part: half of a part of version 1 is
copied; delta: the same of a delta; sent: version 1 is complete.
"""

import os
import pathlib
import signal
import sys

import numpy as np

from areal_jax.publication.carriers.shm_carrier import ShmSender
from areal_jax.publication.carriers.shm_segment import segment_path
from tests.publication.carriers.record_samples import SIZES, held, make_record


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def copy_until(n_copies: int, half: bool):
    """np.copyto that dies in its n-th call, with half of the bytes copied or none."""
    copy, left = np.copyto, n_copies

    def copyto(target, source):
        nonlocal left
        left -= 1
        if left == 0:
            if half:
                copy(target[: len(target) // 2], source[: len(source) // 2])
            die()
        copy(target, source)

    return copyto


def send(path: pathlib.Path, moment: str) -> None:
    sender = ShmSender(path)
    if moment == 'created':
        die()
    sender.send(first := make_record(0))
    if moment in ('header', 'part', 'delta'):
        np.copyto = copy_until(1 if moment == 'header' else SIZES.index(3_000_000) + 1, half=moment != 'header')
    sender.send(make_record(1, SIZES, held(first) if moment == 'delta' else None))
    die()


def main() -> None:
    for moment in sys.argv[2:]:
        if not (child := os.fork()):
            send(segment_path(moment, '0', pathlib.Path(sys.argv[1])), moment)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL, moment


if __name__ == '__main__':
    main()
