"""The chat template that model.chat_template puts in place of the one that came with the weights. Needs no jax."""

from __future__ import annotations

import pathlib

from areal_jax.app.model.run_config import read_run_config
from areal_jax.config import TrackedConfig
from areal_jax.config.ranges import ConfigError
from areal_jax.installation import PACKAGE, locate_file
from areal_jax.text.chat_template import GivenTemplate

_LARGEST_BYTES = 2**20


def read_given_template(config: TrackedConfig) -> GivenTemplate | None:
    """The template that the config names, else that of the run it starts from, and so on; None = that of the weights.

    Raises ConfigError for a file that is missing or cannot be read.
    """
    runs: list[str] = []
    while not (value := config.model.chat_template) and config.model.source == 'run' and config.model.path not in runs:
        runs.append(config.model.path)
        config = read_run_config(config.model.path)
    if not value:
        return None
    place = f'model.chat_template={value!r}'
    try:
        path = locate_file(value) if value.startswith(PACKAGE) else pathlib.Path(value)
        if not path.is_file():
            raise ConfigError(f'{place}: there is no file {str(path)!r}; name one with a template in jinja2')
        if (size := path.stat().st_size) > _LARGEST_BYTES:
            raise ConfigError(f'{place} has {size} bytes, more than {_LARGEST_BYTES}: name a file with a template')
        return GivenTemplate(path.read_text(encoding='utf-8'), place)
    except (OSError, ValueError) as error:  # also bytes that are no UTF-8, and a path that no file can have
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f'{place} cannot be read ({error}): name a text file in UTF-8') from error
