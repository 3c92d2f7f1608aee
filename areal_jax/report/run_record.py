"""A run as read from its workdir, the source of the pages. Made by report.py."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence

from areal_jax import files
from areal_jax.config import CONFIG
from areal_jax.events.schema import Event
from areal_jax.report.aggregates import Metrics
from areal_jax.report.report_keys import Report


@dataclasses.dataclass(frozen=True)
class Run:
    workdir: pathlib.Path
    events: Sequence[Event]
    metrics: Metrics
    report: Report
    loads: Metrics = ()  # of the experts

    @property
    def name(self) -> str:
        """The name of the workdir."""
        return self.workdir.resolve().name

    @property
    def log_version(self) -> int:
        """The earliest version of the event log among the starts of the run."""
        return min((event['version'] for event in self.events if event['kind'] == 'log'), default=1)


def read_fields(workdir: pathlib.Path) -> dict[str, str]:
    """Each field of config.json as 'section.field' with its value as text; {} without the file.

    Raises FileError if the file is not a JSON object.
    """
    path = workdir / CONFIG
    return _flatten(files.read_json(path, 'restore the file as the run wrote it')) if path.exists() else {}


def _flatten(values: Mapping[str, object], prefix: str = '') -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _flatten(value, f'{prefix}{name}.')
        else:
            found[f'{prefix}{name}'] = value if isinstance(value, str) else json.dumps(value)
    return found
