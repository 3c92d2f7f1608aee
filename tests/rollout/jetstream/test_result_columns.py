"""What JetStream's detokenizer reads of a step, by its own rule: columns from the left, up to one that is not valid."""

import numpy as np
import pytest

from areal_jax.rollout.jetstream.server.relay import (
    FILLER,
    count_columns,
    drop_fillers,
    make_data,
    write_row,
)


def read(data, slot, steps):
    """(ids that reach the client, whether the call ends), as process_result_tokens of JetStream 0.2.2 decides it."""
    columns, found = count_columns(steps), []
    for token, valid in zip(data[slot, :columns].tolist(), data[slot, columns : 2 * columns].tolist(), strict=True):
        if not valid:
            return drop_fillers(found), True
        found.append(token)
    return drop_fillers(found), False


@pytest.mark.parametrize('tokens', [[], [5], [5, 6, 7], [5, 6, 7, 0]])
@pytest.mark.parametrize('ends', [False, True])
def test_a_row_brings_its_tokens_and_its_end(tokens, ends):
    data = make_data(3, 4)
    write_row(data, 1, np.array(tokens, np.int32), ends=ends)
    assert [read(data, slot, 4) for slot in range(3)] == [([], False), (tokens, ends), ([], False)]
    assert data.shape == (3, 2 * 5 + 1)  # four tokens and a spare column, their validity, a length
    assert data.dtype == np.int32
    assert data[:, -1].tolist() == [0, 0, 0]  # JetStream ends what is longer than max_tokens: that is ours to keep


def test_a_row_without_a_spare_column_is_refused():
    with pytest.raises(ValueError, match='slot 0: 5 tokens in 5 columns, one of which is spare'):
        write_row(make_data(1, 4), 0, np.arange(5, dtype=np.int32), ends=False)


def test_no_token_is_a_filler():
    assert FILLER < 0
    assert drop_fillers([FILLER, 0, FILLER, 3]) == [0, 3]
