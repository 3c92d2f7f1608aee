"""Under arrow 8: what the user is told when weights do not arrive."""

from __future__ import annotations

from areal_jax.errors import UserError


class PublicationError(UserError, RuntimeError):
    """Weights that can not be sent, or are not what was sent; names version, leaf or directory, and the fix."""
