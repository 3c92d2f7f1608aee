"""Saves without end in forked children and kills each with SIGKILL: argv = directory, seconds until a kill...

Child number k saves steps 1, 2, 3, ... to `directory/k`; step s has the arrays {'w': full(s)} and the run state
{'step': s}. It writes the number of every completed save into `directory/k.done`.
"""

import os
import pathlib
import signal
import sys
import time

import numpy as np
import orbax.checkpoint  # noqa: F401  the children should save at once, not import

from areal_jax.checkpoint.store import CheckpointStore


def save_for_ever(directory: pathlib.Path, done: pathlib.Path) -> None:
    store = CheckpointStore(directory, keep=1)
    for step in range(1, 10**6):
        store.save(step, {'w': np.full(1000, step, np.float32)}, {'step': step})
        done.write_text(str(step))


def main() -> None:
    root = pathlib.Path(sys.argv[1])
    for number, delay in enumerate(sys.argv[2:]):
        done = root / f'{number}.done'
        child = os.fork()
        if child == 0:
            save_for_ever(root / str(number), done)
        while not (done.exists() and done.read_text()):  # the first save is complete
            time.sleep(0.001)
        time.sleep(float(delay))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == '__main__':
    main()
