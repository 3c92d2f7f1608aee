"""Whether a server computes what a run means: what it says of itself when it registers, against the run's config."""

from __future__ import annotations

import dataclasses
from typing import Literal

from areal_jax.errors import UserError
from areal_jax.types import KvPolicy

# of which softmax log-probs are: that at the request's temperature, or that before any
LogprobsMode = Literal['processed', 'raw']


@dataclasses.dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself, and, for a run, what it needs; None: it does not say, or has no need."""

    kv_policy: KvPolicy | None = None  # of unfinished answers at a swap
    context_tokens: int | None = None  # of prompt and answer; a server may have more
    dtype: str | None = None  # of the weights that it decodes with
    logprobs_mode: LogprobsMode | None = None
    hardware: str | None = None  # see EngineStatus; no run needs a certain one


SAYS_NOTHING = ServerFacts()
_FIELDS = {  # of the config
    'kv_policy': 'rollout.kv_policy',
    'context_tokens': 'rollout.context_tokens',
    'dtype': 'publication.dtype',
    'logprobs_mode': 'rollout.temperature',
}


def require_fit(server: str, has: ServerFacts, needs: ServerFacts) -> None:
    """Raises UserError, naming the server, for the first fact that does not fit.

    Args:
      server: its name and address.
    """
    for name, field in _FIELDS.items():
        found, needed = getattr(has, name), getattr(needs, name)
        if found is None or needed is None:
            continue
        if found < needed if name == 'context_tokens' else found != needed:
            raise UserError(
                f'the server {server} has {name}={found!r}, and this run needs {needed!r} ({field}): start it with '
                'the config of the run'
            )
