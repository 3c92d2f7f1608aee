"""What a controller, a registry and a publication cost the processor, as measured.

On two cores of an AMD EPYC, medians of three turns: benchmarks/results/host.json of commit 2c982fb2 (`python -m
benchmarks.host`), and of a batch to the learner `python -m benchmarks.commands`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

# of a batch of 512 groups of 16 answers of 256 tokens, sent to 64 learner processes
_BATCH_BYTES, _BATCH_CPU_S, _BATCH_TOKENS = 17.9e6, 0.092, 512 * 16 * 256


@dataclasses.dataclass(frozen=True)
class HostCosts:
    """In seconds of one core where nothing else is said."""

    answer_s: float
    piece_s: float  # of an answer, besides its tokens
    token_s: float
    question_s: float
    entry_s: float  # of the registry, in a look
    batch_byte_s: float  # of a batch that goes to the learner
    batch_token_bytes: float
    log_bytes: float  # of an answer
    question_log_bytes: float
    write_byte_s: float  # of a version, by the learner
    read_byte_s: float  # of a version, by an engine


MEASURED = HostCosts(
    answer_s=827.1e-6, piece_s=116.0e-6, token_s=3.424e-6, question_s=349.1e-6, entry_s=59.8e-6,
    batch_byte_s=_BATCH_CPU_S / _BATCH_BYTES, batch_token_bytes=_BATCH_BYTES / _BATCH_TOKENS,
    log_bytes=1461.0, question_log_bytes=311.8,
    write_byte_s=0.5814 / 269104460, read_byte_s=0.509 / 269104460,
)  # fmt: skip


def read_costs(host: pathlib.Path) -> HostCosts:
    """From the results of benchmarks/host.py, of this machine or another."""
    rows = json.loads(host.read_text())['rows']
    wire, registry = _find(rows, 'wire'), _find(rows, 'registry', engines=64)
    version = _find(rows, 'publication', dtype='bfloat16')
    return dataclasses.replace(
        MEASURED,
        answer_s=1e-6 * wire['us_answer'], piece_s=1e-6 * wire['us_piece'], token_s=1e-6 * wire['us_token'],
        question_s=1e-6 * wire['us_question'], entry_s=1e-6 * registry['us_entry_read'],
        log_bytes=wire['log_bytes'], question_log_bytes=wire['question_log_bytes'],
        write_byte_s=version['write_cpu_s'] / version['bytes_written'],
        read_byte_s=version['read_cpu_s'] / version['bytes_written'],
    )  # fmt: skip


def _find(rows: Sequence[Mapping[str, Any]], row: str, **fields: object) -> Mapping[str, Any]:
    wanted = {'row': row, **fields}
    return next(found for found in rows if all(found.get(name) == value for name, value in wanted.items()))
