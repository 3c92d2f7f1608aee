"""A learner of experts over eight virtual devices against one device: the loss and every gradient of a minibatch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.moe_parts.layer_case import SIZES
from benchmarks.sides import ROOT

MESHES = {
    'expert 4 x fsdp 2': {'expert': 4, 'fsdp': 2},
    'expert 2 x tensor 2 x data 2': {'expert': 2, 'tensor': 2, 'data': 2},
}
MOST_LOSS, MOST_GRADIENT = 1e-5, 1e-4
_SIDE = 'benchmarks.moe_parts.mesh_side'


def measure_mesh(options: Any) -> dict[str, Any]:
    """Row 10. Of every mesh: relative differences to one device, of the loss and of the gradient of the worst leaf."""
    arguments = {'sizes': SIZES['small' if options.small else 'A'], 'meshes': MESHES}
    with tempfile.TemporaryFile('w+') as errors:
        done = subprocess.run(
            [sys.executable, '-m', _SIDE, json.dumps(arguments)], cwd=ROOT, stdout=subprocess.PIPE, stderr=errors
        )
        if done.returncode:
            errors.seek(0)
            raise RuntimeError(f'{_SIDE} ended with {done.returncode}:\n{errors.read()}')
    found = json.loads(done.stdout)
    met = all(one['loss'] <= MOST_LOSS and one['gradient'] <= MOST_GRADIENT for one in found['meshes'].values())
    return {'value': found.pop('meshes'), 'met': met, **found}
