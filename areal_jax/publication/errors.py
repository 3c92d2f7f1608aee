"""The error of publication."""

from __future__ import annotations

from areal_jax.errors import UserError


class PublicationError(UserError, RuntimeError):
    """Weights cannot be sent, or differ from what was sent; the message names version, leaf or directory, and fix."""
