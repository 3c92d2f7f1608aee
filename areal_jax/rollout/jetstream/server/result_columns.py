"""The array in JetStream's ResultTokens, for dispatches of several tokens, as its detokenizer reads it.

A slot has k columns for the tokens of a dispatch and a spare one. JetStream reads the columns of a slot from the left:
the first invalid column ends the call. So a call that continues has a filler in each column without a token, the spare
one at least, and a call that has ended has an invalid column. Fillers are removed from the reply (`drop_fillers`).
Lengths are 0, because our engine keeps the limit of a call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

FILLER = -1  # no token has this id


def count_columns(steps: int) -> int:
    """The number of token columns for dispatches of `steps` steps."""
    return steps + 1


def make_data(slots: int, steps: int) -> np.ndarray:
    """Returns int32 [slots, 2 (k + 1) + 1]: tokens, their validity, and a length, for slots without news."""
    columns = count_columns(steps)
    data = np.zeros((slots, 2 * columns + 1), np.int32)
    data[:, :columns], data[:, columns : 2 * columns] = FILLER, 1
    return data


def write_row(data: np.ndarray, slot: int, tokens: np.ndarray, *, ends: bool) -> None:
    """Writes the news of one slot: int32 [n] tokens, n at most the steps, and whether the call ends after them."""
    columns = (data.shape[1] - 1) // 2
    if len(tokens) >= columns:
        raise ValueError(f'slot {slot}: {len(tokens)} tokens in {columns} columns, one of which is spare')
    data[slot, : len(tokens)] = tokens
    if ends:
        data[slot, columns + len(tokens)] = 0


def drop_fillers(token_ids: Sequence[int]) -> list[int]:
    """Returns the tokens of a sample without fillers."""
    return [token for token in token_ids if token != FILLER]
