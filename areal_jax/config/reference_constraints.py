"""Rules of the models beside the trained one; see constraints.py."""

from __future__ import annotations

from collections.abc import Iterator

from ml_collections import config_dict

from areal_jax.config.objectives import find_objective, reads_reference


def find_reference_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """What a reference in a directory of its own does not go with, and what a teacher needs."""
    kind = find_objective(c.loss.objective)
    if kind.teacher and not c.loss.teacher:
        yield (
            f'loss.objective={c.loss.objective!r} needs loss.teacher: a Hugging Face directory with the vocabulary of '
            'the model'
        )
    if c.loss.reference and reads_reference(c.loss) and c.lora.rank:
        yield (
            f'loss.reference={c.loss.reference!r} with lora.rank={c.lora.rank}: the frozen weights are kept once, and '
            "those of the reference are others; use loss.reference='', the model at the start, or lora.rank=0"
        )
