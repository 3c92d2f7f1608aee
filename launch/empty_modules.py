"""Empty modules in the place of CUDA packages that SGLang imports and a CPU never calls.

sglang_environment.sh copies this file into SGLang's environment, with a .pth file that calls `provide` in every process
of its interpreter, the scheduler that the server spawns included. Nothing of this project imports it. A package that is
installed is found first, so an environment with the real packages is not changed.
"""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

PACKAGES = (
    'sgl_kernel', 'flashinfer', 'flash_attn', 'torchvision', 'torchcodec', 'soundfile', 'torch_memory_saver',
    'triton_kernels',
)  # fmt: skip


class Absent:
    """An attribute of an empty module: it has attributes, can be compared and hashed, and raises when it is called."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Absent:
        if name.startswith('__'):
            raise AttributeError(name)
        return Absent(f'{self._name}.{name}')

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise ImportError(f'{self._name} is of a package that is not installed: SGLang runs without it on a CPU')


class EmptyModule(types.ModuleType):
    """A module, and a package, with every attribute."""

    __version__ = '0'  # older than whatever transformers asks for

    def __getattr__(self, name: str) -> object:
        if name.startswith('__'):
            raise AttributeError(name)
        return Absent(f'{self.__name__}.{name}')


class InterpolationMode(enum.Enum):
    """torchvision's, whose values are read at import."""

    NEAREST = 'nearest'
    NEAREST_EXACT = 'nearest-exact'
    BILINEAR = 'bilinear'
    BICUBIC = 'bicubic'
    BOX = 'box'
    HAMMING = 'hamming'
    LANCZOS = 'lanczos'


class EmptyFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds PACKAGES and all their modules; stands last, after the finders of what is installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition('.')[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == 'torchvision.transforms':
            module.__dict__['InterpolationMode'] = InterpolationMode


def provide() -> None:
    """Lets this process import the packages; done twice it is done once."""
    if not any(isinstance(finder, EmptyFinder) for finder in sys.meta_path):
        sys.meta_path.append(EmptyFinder())
