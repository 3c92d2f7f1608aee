"""The model of the servers, its weights of every version, and the log-probs that answers must have."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.app.command_line import load_config
from areal_jax.app.model.model import describe_model
from areal_jax.config import TrackedConfig
from areal_jax.types import Segment, Tree, concatenate
from checks.processes import ROOT
from checks.soak.servers import CONFIG, CONTEXT
from tests.rollout.decode.examples import whole_attention

SCALE = 2.0  # of the random weights: versions differ in every log-prob
CHANGED = 0.02  # of the elements of a leaf, from version 0 to each other one
# nats of a token, by publication.dtype; rounding in 16 bits had 0.22 in 640,000 tokens
TOLERANCE = {'float32': 1e-3, 'bfloat16': 0.5}


class Scores:
    """Weights are a function of the version. Use it from one thread."""

    def __init__(self, dtype: str) -> None:
        self.decoder = describe_model(TrackedConfig(load_config(str(ROOT / CONFIG)))).decoder
        self.vocab_size = self.decoder.config.vocab_size
        self.dtype = dtype
        self.params = functools.lru_cache(maxsize=32)(self._draw)
        self._forward = jax.jit(self._logprobs)

    def _draw(self, version: int) -> Tree:
        """Version 0 in which some elements of each leaf are replaced, so that a delta is smaller than a version."""
        leaves, structure = jax.tree.flatten(self.decoder.init(1, SCALE))
        others, rng = jax.tree.leaves(self.decoder.init(version + 1, SCALE)), np.random.default_rng(version)
        changed = [rng.random(leaf.shape) < CHANGED for leaf in leaves]
        drawn = [np.where(*of) for of in zip(changed, others, leaves, strict=True)]
        return jax.tree.unflatten(structure, [jnp.asarray(leaf, self.dtype) for leaf in drawn])

    def logprobs(self, version: int, prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """float32 [A] of the answer tokens int32 [A], at temperature 1."""
        row = np.zeros(CONTEXT, np.int32)
        row[: len(prompt) + len(tokens)] = np.concatenate([prompt, tokens])
        found = np.asarray(self._forward(self.params(version), row))
        return found[len(prompt) - 1 : len(prompt) + len(tokens) - 1]

    def fault(self, prompt: np.ndarray, segments: list[Segment]) -> str:
        """What is wrong with the behaviour log-probs of an answer under the versions that it says; '' for nothing."""
        tokens = concatenate([segment.tokens for segment in segments], np.int32)
        recorded = concatenate([segment.behavior_logprobs for segment in segments], np.float32)
        versions = np.repeat([segment.policy_version for segment in segments], [len(s.tokens) for s in segments])
        for version in np.unique(versions):
            of_version = versions == version
            worst = float(np.abs(self.logprobs(int(version), prompt, tokens) - recorded)[of_version].max())
            if not worst <= TOLERANCE[self.dtype]:
                return f'{of_version.sum()} tokens of version {version} differ by {worst:.3g} nats'
        return ''

    def _logprobs(self, params, row):
        hidden, _ = self.decoder.hidden(params, row, jnp.arange(CONTEXT), whole_attention)
        logprobs = jax.nn.log_softmax(self.decoder.logits(params, hidden).astype(jnp.float32))
        return jnp.take_along_axis(logprobs[:-1], row[1:, None], axis=1)[:, 0]
