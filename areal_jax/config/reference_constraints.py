"""Rules of the models beside the trained one; see constraints.py."""

from __future__ import annotations

from collections.abc import Iterator

from ml_collections import config_dict

from areal_jax.config.objectives import reads_reference


def find_reference_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """What a reference in a directory of its own does not go with."""
    if not c.loss.reference:
        return
    if reads_reference(c.loss) and c.lora.rank:
        yield (
            f'loss.reference={c.loss.reference!r} with lora.rank={c.lora.rank}: the frozen weights are kept once, and '
            "those of the reference are others; use loss.reference='', the model at the start, or lora.rank=0"
        )
