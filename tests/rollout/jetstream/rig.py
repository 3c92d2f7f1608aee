"""A server behind JetStream around the toy backend, in threads of this process; skips where there is no JetStream."""

from __future__ import annotations

import importlib.util

import pytest

from tests.rollout.http.server.rig import ToyServer

needs_jetstream = pytest.mark.skipif(
    importlib.util.find_spec('jetstream') is None,
    reason='this interpreter has no JetStream: bash launch/test_external.sh jetstream',
)


class JetstreamToyServer(ToyServer):
    """Inside, it serves gRPC at `url`."""

    def make_front(self, model, listener, limits, api_key):
        from areal_jax.rollout.jetstream.server.compatibility import import_jetstream

        import_jetstream()
        from areal_jax.rollout.jetstream.server.front import JetstreamFront

        return JetstreamFront(
            self.service.inbox, model, listener,
            limits=limits, decode_steps=self.decode_steps, api_key=api_key, on_death=self.note_death,
        )  # fmt: skip

    def note_death(self, error):
        self.death = error
