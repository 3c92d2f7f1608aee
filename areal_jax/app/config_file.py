"""Which file --config names: a path, a file that comes with the package, or the name of such a file."""

from __future__ import annotations

import dataclasses
import pathlib

from areal_jax.errors import suggest
from areal_jax.installation import PACKAGE, list_configs, locate_file


@dataclasses.dataclass(frozen=True)
class ConfigFile:
    """A config file as named by FILE, FILE:ARGUMENT, package:configs/FILE[:ARGUMENT] or NAME[:ARGUMENT]."""

    name: str  # without the argument: 'configs/a.py' as given, 'package:configs/tiny_cpu.py' for 'tiny_cpu'
    argument: str | None  # of get_config; None without a colon

    @property
    def source(self) -> str:
        """What names the same file and argument, also where the working directory has a file called NAME."""
        return self.name if self.argument is None else f'{self.name}:{self.argument}'

    @property
    def path(self) -> pathlib.Path:
        return locate_file(self.name) if self.name.startswith(PACKAGE) else pathlib.Path(self.name)

    @property
    def absolute_source(self) -> str:
        """`source` with an absolute path, for other working directories; a file of the package needs none."""
        if self.name.startswith(PACKAGE):
            return self.source
        return dataclasses.replace(self, name=str(self.path.absolute())).source


def find_config_file(source: str) -> ConfigFile:
    """The file that `source` names; there need be no such file. A file in the working directory comes before a NAME."""
    prefix = PACKAGE if source.startswith(PACKAGE) else ''
    rest, colon, argument = source.removeprefix(prefix).partition(':')
    name = prefix + rest
    if not pathlib.Path(name).is_file() and name in list_configs():
        name = f'{PACKAGE}configs/{name}.py'
    return ConfigFile(name, argument if colon else None)


def suggest_config(file: ConfigFile) -> str:
    """'; did you mean NAME?' for a file that is not there, from its folder and from what comes with the package."""
    path = file.path
    if near := suggest(path.name, [other.name for other in path.parent.glob('*.py')]):
        return near
    named = file.name.removeprefix(PACKAGE).removeprefix('configs/').removesuffix('.py')
    return suggest(named, list_configs()) or '; areal-config lists the configs that come with the package'
