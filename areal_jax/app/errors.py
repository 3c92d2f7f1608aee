"""Errors that are the user's to mend: one sentence, no traceback."""

from __future__ import annotations

from areal_jax.checkpoint.state import RunStateError
from areal_jax.checkpoint.store import CheckpointError
from areal_jax.control.clocks.loop import CallDeadlineError, StallError
from areal_jax.control.controller import UnverifiedError
from areal_jax.learning.commands import CommandError
from areal_jax.learning.rows import BatchError
from areal_jax.models.attention import AttentionError
from areal_jax.models.gguf import GgufError
from areal_jax.models.hf import WeightsError
from areal_jax.models.hf_config import HfError
from areal_jax.publication.errors import PublicationError
from areal_jax.ranges import ConfigError
from areal_jax.rollout.engine import PromptTooLongError
from areal_jax.tasks.task import TaskError
from areal_jax.tasks.tokenizer import TokenizerError
from areal_jax.tasks.verifier import VerifierError

USER_ERRORS = (
    AttentionError,
    BatchError,
    CommandError,
    HfError,
    ConfigError,
    CheckpointError,
    CallDeadlineError,
    StallError,
    GgufError,
    PromptTooLongError,
    PublicationError,
    RunStateError,
    TaskError,
    TokenizerError,
    UnverifiedError,
    VerifierError,
    WeightsError,
)
