"""The errors of publication, raised by every module of this package."""

from __future__ import annotations

from areal_jax.errors import UserError


class PublicationError(UserError, RuntimeError):
    """Weights cannot be sent, or differ from what was sent; the message names version, leaf or directory, and fix."""


class ChainFull(PublicationError):
    """A carrier has no room for a delta behind the newest whole record; the channel then sends the version whole."""
