"""What reads calls in the notation that a config names.

The package renderers is imported where one of its renderers is named: other runs need not have it.
"""

from __future__ import annotations

from areal_jax.rollout.http.wire.answer_reader import NOTATIONS, AnswerParser
from areal_jax.text.tokenizer import Tokenizer


def require_notation(name: str, field: str) -> None:
    """Raises UserError for a notation that neither this project nor the package knows; `field` of the config has it."""
    if name not in NOTATIONS:
        from areal_jax.rollout.http.wire.renderers_parser import require_renderer

        require_renderer(name, field)


def build_parser(name: str, field: str, tokenizer: Tokenizer) -> AnswerParser | None:
    """None for one of NOTATIONS; raises UserError as `require_notation` does, and for a tokenizer that does not fit."""
    if name in NOTATIONS:
        return None
    from areal_jax.rollout.http.wire.renderers_parser import RenderersParser

    return RenderersParser(tokenizer, name, field)
