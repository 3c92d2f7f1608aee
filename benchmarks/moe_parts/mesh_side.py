"""A process of mesh.py with eight virtual devices: one update of a learner on each mesh, and on one device.

Arguments: sizes (of layer_case), meshes ({name: axes}). The optimizer is SGD without clipping, so that the step of a
leaf is its gradient. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

LAYERS, GROUPS, GROUP_SIZE, VOCABULARY, VERSION = 2, 24, 8, 256, 2
RATE = 10.0  # so that a step is far above the rounding of its weight
_DEVICES = '--xla_force_host_platform_device_count=8'


def compare(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """By mesh: relative differences of the loss and of the gradient of the worst leaf; and how much was compared."""
    import numpy as np

    from areal_jax.models.decoder import Decoder

    config = describe_model(arguments['sizes'])
    params = Decoder(config).init(seed=2, scale=2.0)
    metrics, gradients = update_once(config, params, {})
    loss = metrics['loss/value']
    found = {}
    for name, axes in arguments['meshes'].items():
        other, others = update_once(config, params, axes)
        distance = {
            path: float(np.linalg.norm(others[path] - gradient) / np.linalg.norm(gradient))
            for path, gradient in gradients.items()
        }
        worst = max(distance, key=distance.__getitem__)
        found[name] = {'loss': abs(other['loss/value'] / loss - 1), 'gradient': distance[worst], 'leaf': worst}
    trained = metrics['update/trained_tokens']
    return {'meshes': found, 'leaves': len(gradients), 'loss': loss, 'trained_tokens': trained}


def describe_model(sizes: Mapping[str, int]) -> Any:
    """A ModelConfig of the Qwen3-MoE family with layers of these sizes."""
    from areal_jax.models.families import ModelConfig
    from areal_jax.models.layer_parts import Experts

    return ModelConfig(
        vocab_size=VOCABULARY, d_model=sizes['d'], n_layers=LAYERS, n_heads=4, n_kv_heads=2, head_dim=sizes['d'] // 4,
        d_ff=sizes['width'], rope_theta=1e4, tie_embeddings=False, qk_norm=True, family='qwen3_moe',
        experts=Experts(sizes['experts'], sizes['choices'], sizes['width']),
    )  # fmt: skip


def update_once(config: Any, params: Any, axes: Mapping[str, int]) -> tuple[dict[str, float], dict[str, Any]]:
    """(metrics, gradients by the names of their leaves) of a packed minibatch."""
    import jax
    import numpy as np

    from areal_jax.learning.learner import SpmdLearner
    from areal_jax.models.decoder import Decoder
    from areal_jax.sharding.rules import make_mesh, path_name
    from tests.learning.examples import learner_settings, make_optimizer, random_groups

    rows = {'row_tokens': 128, 'row_loss_tokens': 96, 'rows_per_microbatch': 8}
    settings = learner_settings(strategy='fsdp_tensor', **rows)
    learner = SpmdLearner(
        Decoder(config), params, make_mesh(**axes), optimizer=make_optimizer('sgd', clip_norm=0),
        learning_rate=RATE, settings=settings,
    )  # fmt: skip
    groups = random_groups(5, GROUPS, group_size=GROUP_SIZE, vocabulary=VOCABULARY)
    metrics = learner.update(groups, version=VERSION)
    steps = jax.tree.map(lambda before, after: np.asarray(before) - np.asarray(after), params, learner.save()['params'])
    learner.close()
    leaves = jax.tree_util.tree_leaves_with_path(steps)
    return metrics, {path_name(path): step / RATE for path, step in leaves}


def main() -> None:
    os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {_DEVICES}'.strip()
    os.environ['JAX_PLATFORMS'] = 'cpu'
    answers = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)  # what libraries print is no answer
    print(json.dumps(compare(json.loads(sys.argv[1]))), file=answers, flush=True)


if __name__ == '__main__':
    main()
