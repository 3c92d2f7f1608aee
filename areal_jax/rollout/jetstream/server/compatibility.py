"""Shims for names that JetStream 0.2.2 needs and current packages lack. For the server's process alone.

It imports seqio for two base classes, which brings TensorFlow; it calls jax.tree_map, which is gone from jax; and it
sets the root logger to DEBUG, with a handler that prints several lines for each dispatch.
"""

from __future__ import annotations

import abc
import importlib
import importlib.util
import logging
import sys
import types

import jax

from areal_jax.errors import UserError


def is_installed() -> bool:
    """Whether this interpreter has JetStream; imports nothing."""
    return importlib.util.find_spec('jetstream') is not None


def import_jetstream() -> None:
    """Imports JetStream's orchestrator, once; the other modules of this package import it by name afterwards.

    Raises UserError if this interpreter lacks it.
    """
    if not is_installed():
        raise UserError(
            f"rollout.server='jetstream': {sys.executable} has no JetStream; make an environment that has it with "
            '`bash launch/jetstream_environment.sh`'
        )
    _stand_in_for_seqio()
    if not hasattr(jax, 'tree_map'):
        jax.tree_map = jax.tree_util.tree_map  # type: ignore[attr-defined]
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    importlib.import_module('jetstream.core.orchestrator')
    root.setLevel(level)
    for handler in root.handlers[:]:
        if handler not in handlers:
            root.removeHandler(handler)


def _stand_in_for_seqio() -> None:
    """Provides the two names that JetStream imports from seqio; it uses them as types, unless it loads a tokenizer."""
    if 'seqio' in sys.modules or importlib.util.find_spec('seqio') is not None:
        return
    vocabularies = types.ModuleType('seqio.vocabularies')

    class Vocabulary(abc.ABC):  # noqa: B024
        """Stands for seqio's."""

    class SentencePieceVocabulary(Vocabulary):
        """Stands for seqio's."""

    vocabularies.Vocabulary = Vocabulary  # type: ignore[attr-defined]
    vocabularies.SentencePieceVocabulary = SentencePieceVocabulary  # type: ignore[attr-defined]
    seqio = types.ModuleType('seqio')
    seqio.vocabularies = vocabularies  # type: ignore[attr-defined]
    sys.modules['seqio'], sys.modules['seqio.vocabularies'] = seqio, vocabularies
