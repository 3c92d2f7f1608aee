"""Rules between the fields of publication and others."""

from __future__ import annotations

from collections.abc import Iterator

from ml_collections import config_dict

from areal_jax.config.addresses import split_address
from areal_jax.config.cluster import parse_learner
from areal_jax.config.kinds import find_channel, find_server


def find_record_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Who can send versions as records, and who can read them."""
    setting = f'publication.channel={c.publication.channel!r}'
    if c.publication.listen and split_address(c.publication.listen) is None:
        yield (
            f'publication.listen={c.publication.listen!r} must be a host or host:port, with brackets around a host of '
            'IPv6: name an interface of this machine'
        )
    if not find_channel(c.publication.channel).sends_records:
        return
    if not find_server(c.rollout.server).reads_records:
        yield (
            f'{setting} with rollout.server={c.rollout.server!r}: these servers load directories of files; use '
            "publication.channel='files', or rollout.server='own'"
        )
    if parse_learner(c.cluster.learner).hosts is not None:
        yield (
            f'{setting} with cluster.learner={c.cluster.learner!r}: learners in roles or over several processes write '
            "files; use publication.channel='files', or a learner in one process"
        )


def find_delta_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Who cannot send or take what changed between two versions."""
    publication, server = c.publication, c.rollout.server
    if not publication.delta:
        return
    for path, value, fits, why in (
        (
            *('publication.channel', publication.channel, find_channel(publication.channel).has_deltas),
            "it carries whole versions only; use publication.channel='files'",
        ),
        (
            *('publication.dtype', publication.dtype, publication.dtype != 'float32'),
            '99.8 % of the elements of float32 weights change in each update, so that no delta is smaller; use '
            "publication.dtype='bfloat16'",
        ),
        (
            *('cluster.learner', c.cluster.learner, parse_learner(c.cluster.learner).hosts is None),
            'each process writes its own leaves, and a delta needs the version before in one process; use a learner '
            'in the process of the trainer',
        ),
        (
            *('rollout.server', server, find_server(server).reads_deltas),
            "these servers load whole directories; use rollout.server='own'",
        ),
    ):
        if not fits:
            yield f'publication.delta=True with {path}={value!r}: {why}, or publication.delta=False'
