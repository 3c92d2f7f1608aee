"""What every benchmark ends with: its numbers, and where they come from, as JSON."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from areal_jax.app.workdir.environment import git_commit, hardware, package_versions


def write_report(numbers: Mapping[str, Any], out: pathlib.Path | None) -> dict[str, Any]:
    """`numbers` with hardware, versions and commit: printed, written to `out` where there is one, and returned."""
    whole = {**numbers, 'hardware': hardware(), 'versions': package_versions(), 'commit': git_commit()}
    text = json.dumps(whole, indent=1)
    print(text)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + '\n')
    return whole
