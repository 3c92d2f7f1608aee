"""What the recurrent states of an engine hold: of every place, which tokens its state is behind."""

from collections.abc import Sequence

from areal_jax.rollout.state_pool import StateSizes


class ToyStates:
    """For every place the tokens that its state is behind, and the versions of the weights that read them."""

    def __init__(self, sizes: StateSizes | None):
        self._sizes = sizes
        self.places: list[tuple[list[int], list[int]]] = [([], [])] * (sizes.places if sizes else 0)

    def begin(self, place: int, tokens: Sequence[int], versions: Sequence[int]) -> None:
        """Asserts that the state is behind exactly these tokens; without tokens, it begins anew."""
        if self._sizes is not None:
            if not len(tokens):
                self.places[place] = [], []
            found = self.places[place]
            assert found == (tokens, versions), f'place {place} has the state behind {found}, not {tokens, versions}'

    def advance(self, place: int, tokens: Sequence[int], version: int) -> None:
        if self._sizes is not None:
            before, versions = self.places[place]
            self.places[place] = [*before, *tokens], [*versions, *[version] * len(tokens)]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies in order, and asserts that all at once would give the same."""
        targets = [target for _, target in copies]
        assert len(targets) == len(set(targets))
        for index, (source, target) in enumerate(copies):
            assert source not in targets[:index], f'place {source} is the target of a copy before'
            self.places[target] = self.places[source]
