"""The type names of JSON values in this package: what users' files, saved positions and worker processes hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = Any  # what json.loads returns: null, a bool, number or text, a list or an object
JsonObject = Mapping[str, Json]
