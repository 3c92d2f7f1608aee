"""A version of SmolLM2-135M through the files channel: bytes, CPU seconds of the learner's side and of an engine's.

The weights are in one process; a learner over several writes the same files, each process the files of its own leaves.
An engine reads as a server does: every leaf, with its digest computed again.
"""

from __future__ import annotations

import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from areal_jax.formats.gguf import find_package_file, load_gguf
from areal_jax.publication.files_channel import FilesChannel, find_version, load_version
from benchmarks.generation_cells import GGUF
from benchmarks.sides import Call, Start, serve


def measure_publication(dtype: str, versions: int) -> dict[str, float]:
    """Of one version, on average over so many after a first."""
    config, params, _ = load_gguf(find_package_file(GGUF))
    copy = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params)
    del params
    parameters = sum(leaf.size for leaf in jax.tree.leaves(copy))
    write_s = read_s = 0.0
    with tempfile.TemporaryDirectory() as folder:
        channel = FilesChannel(folder, config, verify=True)
        for version in range(versions + 1):
            began_s = time.process_time()
            published = channel.transfer(version, copy)
            written_s = time.process_time()
            load_version(find_version(published.handle, version), config, verify=True)
            if version:
                write_s += written_s - began_s
                read_s += time.process_time() - written_s
            channel.release(version)
        sizes = [path.stat().st_size for path in pathlib.Path(published.handle).iterdir()]
    return {
        'parameters': parameters, 'bytes': sum(sizes), 'files': len(sizes),
        'write_cpu_s': write_s / versions, 'read_cpu_s': read_s / versions,
    }  # fmt: skip


def prepare(arguments: dict[str, Any]) -> Start:
    def start() -> tuple[Call, Callable[[], dict[str, Any]]]:
        return lambda: measure_publication(**arguments), dict

    return start


if __name__ == '__main__':
    serve(prepare)
