"""Which process of a run on one machine gets which of its GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from ml_collections import config_dict

from areal_jax.config.cluster import ENGINES, LEARNER, parse_engines, parse_learner
from areal_jax.config.fields import ConfigError
from areal_jax.config.kinds import find_server


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
