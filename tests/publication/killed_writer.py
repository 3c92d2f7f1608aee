"""Writes versions without end in forked children and kills each with SIGKILL: argv = directory, seconds until a kill...

Child number k writes `directory/k/v000000`, `v000001`, ...; all weights of version v are v.
"""

import os
import pathlib
import signal
import sys
import time

import jax
import numpy as np
import safetensors.numpy  # noqa: F401  the children should write at once, not import

from areal_jax.formats.hf_export import plan_hf_files
from areal_jax.publication.export import write_hf_directory
from tests.publication.tiny import ABSTRACT, CONFIG


def write_for_ever(directory: pathlib.Path) -> None:
    for version in range(10**6):
        params = jax.tree.map(lambda leaf: np.full(leaf.shape, version, leaf.dtype), ABSTRACT)
        files = plan_hf_files(params, CONFIG)
        write_hf_directory(directory / f'v{version:06d}', files, {'manifest.json': {'version': version}})


def main() -> None:
    for number, delay in enumerate(sys.argv[2:]):
        directory = pathlib.Path(sys.argv[1], str(number))
        child = os.fork()
        if child == 0:
            write_for_ever(directory)
        while not (directory / 'v000000').exists():
            time.sleep(0.001)
        time.sleep(float(delay))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == '__main__':
    main()
