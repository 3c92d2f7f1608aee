"""The GPUs of this machine, and which process of a run gets which."""

from __future__ import annotations

import importlib.util
import pathlib
import re
from collections.abc import Mapping, Sequence

from ml_collections import config_dict

from areal_jax.config.cluster import ENGINES, LEARNER, parse_engines, parse_learner
from areal_jax.config.fields import ConfigError
from areal_jax.config.kinds import find_server

VISIBLE = 'CUDA_VISIBLE_DEVICES'
_PLATFORMS = {'cuda', 'gpu'}
_PLUGINS = ('jax_cuda12_plugin', 'jax_cuda13_plugin')  # the packages without which jax computes on the CPU


def find_gpus(environment: Mapping[str, str], devices: pathlib.Path = pathlib.Path('/dev')) -> tuple[str, ...]:
    """The GPUs that jax would find, as CUDA_VISIBLE_DEVICES names them; () where it computes on the CPU.

    Args:
      environment: of this process; JAX_PLATFORMS and CUDA_VISIBLE_DEVICES count.
      devices: the directory with the device files nvidia0, nvidia1 and so on.
    """
    asked = environment.get('JAX_PLATFORMS', '')
    if asked and not _PLATFORMS & set(asked.split(',')):
        return ()
    if not any(importlib.util.find_spec(name) for name in _PLUGINS):
        return ()
    found = sum(re.fullmatch(r'nvidia\d+', path.name) is not None for path in devices.glob('nvidia*'))
    if VISIBLE not in environment:
        return tuple(str(number) for number in range(found))
    names = [name.strip() for name in environment[VISIBLE].split(',')]
    end = next((place for place, name in enumerate(names) if name in ('', '-1')), len(names))
    return tuple(names[:end]) if found else ()  # CUDA reads no further than the first invalid name


def share_gpus(config: config_dict.ConfigDict, gpus: Sequence[str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of each process, 'learner-0', 'engine-1': the learner's first, then each engine's.

    Engines that share the learner's first device see that one. Nothing where there are no GPUs.

    Raises ConfigError where the run needs more than there are.
    """
    if not gpus:
        return {}
    learner, engines = parse_learner(config.cluster.learner), parse_engines(config.cluster.engines)
    has_engines = find_server(config.rollout.server).launch is not None
    own = engines.devices if has_engines else 0
    if learner.devices + own > len(gpus):
        beside = f' and {ENGINES}={str(engines)!r} needs {own}' if own else ''
        raise ConfigError(
            f'{LEARNER}={str(learner)!r} needs {learner.devices} GPUs{beside}; this machine has {len(gpus)} '
            f'({",".join(gpus)}): lower a size, or set JAX_PLATFORMS=cpu to compute on the CPU'
        )
    each = learner.devices_per_process
    shared = {f'learner-{k}': gpus[k * each : (k + 1) * each] for k in range(learner.processes)}
    for index, numbers in enumerate(engines.place(learner.devices) if has_engines else ()):
        shared[f'engine-{index}'] = gpus[:1] if engines.shared else [gpus[number] for number in numbers]
    return {name: ','.join(names) for name, names in shared.items()}
