"""Records that are too long for trailing metadata, until their clients fetch them."""

from __future__ import annotations

import collections

MOST_BYTES = 64 << 20  # of all records; the oldest are forgotten above


class KeptRecords:
    """Records by the id of their request; the last one is kept whatever its length."""

    def __init__(self, most_bytes: int = MOST_BYTES):
        self._most, self._bytes = most_bytes, 0
        self._records: collections.OrderedDict[str, bytes] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def keep(self, request_id: str, record: bytes) -> None:
        self.take(request_id)
        self._records[request_id] = record
        self._bytes += len(record)
        while self._bytes > self._most and len(self._records) > 1:
            self.take(next(iter(self._records)))

    def take(self, request_id: str) -> bytes:
        """Removes and returns the record of an id; b'' without one."""
        record = self._records.pop(request_id, b'')
        self._bytes -= len(record)
        return record
