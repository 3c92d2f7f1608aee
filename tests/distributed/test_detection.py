"""A process that is told where the others are is not told otherwise by its environment."""

import jax
import pytest

from areal_jax.distributed import rendezvous


@pytest.mark.parametrize(('coordinator', 'method'), [('n1:6000', 'deactivate'), ('', None)])
def test_jax_detects_a_cluster_only_where_nothing_was_said(coordinator, method, monkeypatch):
    """jax's detection of SLURM also leaves a process one GPU only."""
    given = {}
    monkeypatch.setattr(jax.distributed, 'initialize', lambda **arguments: given.update(arguments))
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    monkeypatch.setattr(rendezvous.atexit, 'register', lambda *arguments: None)
    rendezvous.join(coordinator, 2, 1 if coordinator else None, 5.0)
    assert given['cluster_detection_method'] == method
