"""The array in JetStream's ResultTokens, for dispatches of several tokens: what its detokenizer makes of each cell.

A slot has k columns for the tokens of a dispatch and a spare one. JetStream reads the columns of a slot from the left:
the first one that is not valid ends the call. So a call that goes on has a filler in each column without a token, the
spare one at least, and one that has ended has a column that is not valid. Fillers are taken out of the reply
(`drop_fillers`). Lengths are 0, because the limit of a call is kept by our engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

FILLER = -1  # no token has this id


def count_columns(steps: int) -> int:
    """Of the tokens, for dispatches of so many steps."""
    return steps + 1


def make_data(slots: int, steps: int) -> np.ndarray:
    """int32 [slots, 2 (k + 1) + 1]: tokens, their validity, and a length, of slots without news."""
    columns = count_columns(steps)
    data = np.zeros((slots, 2 * columns + 1), np.int32)
    data[:, :columns], data[:, columns : 2 * columns] = FILLER, 1
    return data


def write_row(data: np.ndarray, slot: int, tokens: np.ndarray, *, ends: bool) -> None:
    """The news of one slot: int32 [n] tokens, n at most the steps, and whether the call ends behind them."""
    columns = (data.shape[1] - 1) // 2
    if len(tokens) >= columns:
        raise ValueError(f'slot {slot}: {len(tokens)} tokens in {columns} columns, one of which is spare')
    data[slot, : len(tokens)] = tokens
    if ends:
        data[slot, columns + len(tokens)] = 0


def drop_fillers(token_ids: Sequence[int]) -> list[int]:
    """The tokens of a sample."""
    return [token for token in token_ids if token != FILLER]
