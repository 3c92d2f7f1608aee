"""Types of JSON values in this package: lines of users' files, saved positions, messages of worker processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = Any  # what json.loads returns: null, a bool, number or text, a list or an object
JsonObject = Mapping[str, Json]
