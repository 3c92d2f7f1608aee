"""The kinds of config fields. A declaration is one value: default, allowed values, meaning, and when it is used.

A section is a table in declarations.py, or a dataclass (`ConfigSection`) that is passed, with the values of a config,
to the part that uses it. __init__.py builds and validates configs; page.py documents the fields.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, ClassVar, ParamSpec, TypeAlias, TypeVar, cast

from ml_collections import config_dict

from areal_jax.config.addresses import name_hosts
from areal_jax.errors import UserError, suggest
from areal_jax.files import describe_url, is_address
from areal_jax.plugins import is_own


class ConfigError(UserError, ValueError):
    """A configuration that cannot run; the message names the fields, their values and the fix."""


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, both included; NaN is never inside."""

    low: float
    high: float
    rule: str  # the range in words, after 'must'
    or_none: bool = False  # None is allowed too

    def __contains__(self, value: float | None) -> bool:
        return self.or_none if value is None else self.low <= value <= self.high

    def require(self, field: str, value: float | None) -> None:
        """Raises ConfigError if `value` is outside."""
        if value not in self:
            raise ConfigError(f'{field}={value} must {self.describe()}')

    def describe(self) -> str:
        """The rule in words: 'be at least 1 and below 2^31, or be None'."""
        return f'{self.rule}, or be None' if self.or_none else self.rule


# Programs compute in float32: a number that float32 rounds to 0, to 1 or to infinity is refused like these three.
_LEAST, _BELOW_ONE, _MOST = 2.0**-126, 1 - 2.0**-24, (2 - 2.0**-23) * 2.0**127

_INT32 = 2**31 - 1
DTYPES = ('float32', 'bfloat16', 'float16')
SEED = Range(0, _INT32, 'lie in [0, 2^31 - 1]')
COUNT = Range(1, _INT32, 'be at least 1 and below 2^31')
COUNT_OR_OFF = Range(0, _INT32, 'not be negative, and be below 2^31')
THREADS = Range(1, 1024, 'be at least 1 and at most 1024')
BYTES = Range(1, 2**50, 'lie in [1, 2^50]')
MEBIBYTES = Range(0, 2**40, 'lie in [0, 2^40]')
SECONDS = Range(_LEAST, 1e6, 'be above 0 and at most 1e6 (11 days)')  # below threading.TIMEOUT_MAX
LEASE = Range(1, 3600, 'be from 1 to 3600 (an hour)')
POSITIVE = Range(_LEAST, _MOST, 'be above 0 and finite, in float32')
NOT_NEGATIVE = Range(0, _MOST, 'not be negative, infinite or NaN, in float32')
VERSIONS = Range(0, math.inf, 'be at least 0; 0 is synchronous')
SHARE = Range(0, 1, 'lie in [0, 1]')
SHARE_ABOVE_ZERO = Range(_LEAST, 1, 'lie in (0, 1]')
WEIGHT = Range(_LEAST, 1e6, 'be above 0 and at most 1e6; to leave a source out, remove it')
DECAY = Range(0, _BELOW_ONE, 'lie in [0, 1), in float32')
LOSS_SCALE = Range(_LEAST, 2.0**32, 'lie in (0, 2^32]')  # the reciprocal of a larger one is too near 0 for float32


Value: TypeAlias = bool | int | float | str | tuple[int, ...] | tuple[str, ...] | None
Option: TypeAlias = bool | int | float | str | tuple[bool | int | float | str | None, ...] | None  # of a free section


_DECLARED = 'declared'  # key of metadata
Config: TypeAlias = Any  # a ConfigDict, a TrackedConfig, or sections with the fields of one as attributes


def always(config: Config) -> bool:
    """Says that every run uses the field, if it uses the section."""
    return True


class Purpose(enum.Enum):
    """The purpose for which a config is read."""

    TRAINING = enum.auto()
    EVALUATION = enum.auto()
    SERVING = enum.auto()
    SCORING = enum.auto()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Use:
    """The condition for using a field, and the field's other names."""

    # whether a training run with this config uses the field; if not, the part that gets the section gets the default
    used_if: Callable[[Config], bool] = always
    also_for: tuple[Purpose, ...] = ()  # purposes besides training for which the field is used
    other_names: str = ''  # in other RL libraries, with spaces between
    compared: bool = True  # False: an argument of programs, so that sections with other values run the same programs


class Field(Use, abc.ABC):
    """One field of the config: its default, allowed values, meaning, and when it is used."""

    default: Value | Mapping[str, Option]
    meaning: str  # for the reader of the table and of docs/config.md
    kind: ClassVar[str]  # 'a whole number': what a value of another type must become

    @abc.abstractmethod
    def has_type(self, value: object) -> bool:
        """Whether `value` is of the field's type."""

    def require_type(self, path: str, value: object) -> None:
        """Raises ConfigError for a value of another type; `path` is the field's name, 'rollout.slots'."""
        if value is None and self.default is None:
            return
        if not self.has_type(value):
            raise ConfigError(f'{path}={value!r} must be {self.kind}')
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and ('\0' in text or not _is_unicode(text)):
                raise ConfigError(f'{path}={text!r} must be text in UTF-8, without zero bytes')

    def require_allowed(self, path: str, value: Value) -> None:
        """Raises ConfigError for a value of the right type that the field does not allow."""

    def rule(self) -> str:
        """The requirement on a value, in words: 'be a whole number', 'lie in [0, 1]'."""
        return f'be {self.kind}'

    def initial(self) -> object:
        """The initial value in a ConfigDict: the default, or, if that is None, a placeholder that keeps the type."""
        return self.default


@dataclasses.dataclass(frozen=True, eq=False)
class _Number(Field):
    default: int | float | None
    range: Range
    meaning: str
    type: ClassVar[type]

    @property
    def allowed(self) -> Range:
        """The range, which includes None if the default is None."""
        return dataclasses.replace(self.range, or_none=self.default is None)

    def require_allowed(self, path: str, value: Value) -> None:
        self.allowed.require(path, value)  # type: ignore[arg-type]  # require_type has refused what is no number

    def rule(self) -> str:
        return self.allowed.describe()

    def initial(self) -> object:
        return config_dict.placeholder(self.type) if self.default is None else self.default


class Integer(_Number):
    """A whole number; a default of None allows None."""

    kind: ClassVar[str] = 'a whole number'
    type: ClassVar[type] = int

    def has_type(self, value: object) -> bool:
        return _is_integer(value)


class Real(_Number):
    """A number; a default of None allows None."""

    kind: ClassVar[str] = 'a number'
    type: ClassVar[type] = float

    def has_type(self, value: object) -> bool:
        return isinstance(value, float) or _is_integer(value)


@dataclasses.dataclass(frozen=True, eq=False)
class _Unbounded(Field):
    default: bool | str | tuple[int, ...] | tuple[str, ...] | Mapping[str, Option]
    meaning: str


class Flag(_Unbounded):
    kind: ClassVar[str] = 'True or False'

    def has_type(self, value: object) -> bool:
        return isinstance(value, bool)


class Text(_Unbounded):
    kind: ClassVar[str] = 'text'

    def has_type(self, value: object) -> bool:
        return isinstance(value, str)


class Path(Text):
    """A path, or a text that contains one, such as FILE:FUNCTION or log(RUN); a URL is refused."""

    def require_allowed(self, path: str, value: Value) -> None:
        require_local(path, value)


class Address(Path):
    """A path, or an address of an object store."""

    def require_allowed(self, path: str, value: Value) -> None:
        if isinstance(value, str) and not is_address(value):
            require_local(path, value)


@dataclasses.dataclass(frozen=True, eq=False)
class Choice(Field):
    """One of several names."""

    default: str
    choices: tuple[str, ...]
    meaning: str
    kind: ClassVar[str] = 'text'

    def has_type(self, value: object) -> bool:
        return isinstance(value, str)

    def require_allowed(self, path: str, value: Value) -> None:
        if value not in self.choices:
            raise ConfigError(f'{path}={value!r} is not known; use one of {self._listed()}')

    def rule(self) -> str:
        return f'be one of {self._listed()}'

    def _listed(self) -> str:
        return ', '.join(choice or "''" for choice in self.choices)


class ChoiceOrOwn(Choice):
    """One of several names, or a function of the user's own (areal_jax/plugins.py)."""

    def require_allowed(self, path: str, value: Value) -> None:
        require_local(path, value)
        if not (isinstance(value, str) and is_own(value)):
            super().require_allowed(path, value)

    def rule(self) -> str:
        return f'{super().rule()}, or FILE.py:FUNCTION'


class Options(_Unbounded):
    """A section with any keys, for parameters of the user's own code; empty by default."""

    kind: ClassVar[str] = 'a section of options, each a number, a text, True, False, None or a tuple of these'

    def has_type(self, value: object) -> bool:
        if not isinstance(value, Mapping | config_dict.ConfigDict):
            return False
        values = [value[key] for key in value]
        elements = [element for option in values for element in (option if isinstance(option, tuple) else [option])]
        return all(element is None or isinstance(element, bool | int | float | str) for element in elements)

    def require_type(self, path: str, value: object) -> None:
        """Raises ConfigError if the value is no section, an option has a wrong type, or a key is no identifier."""
        if not isinstance(value, Mapping | config_dict.ConfigDict):
            raise ConfigError(f'{path}={value!r} must be {self.kind}; set one of them, {path}.KEY=VALUE')
        for key in value:
            if not self.has_type({key: value[key]}):
                shown = value[key].to_dict() if isinstance(value[key], config_dict.ConfigDict) else value[key]
                raise ConfigError(
                    f'{path}.{key}={shown!r} must be a number, a text, True, False, None or a tuple of them'
                )
            if not key.isidentifier():
                raise ConfigError(f'{path}.{key}: the name of an option must be that of a parameter in Python')

    def initial(self) -> object:
        return config_dict.ConfigDict()


@dataclasses.dataclass(frozen=True, eq=False)
class Sources(_Unbounded):
    """A section of sections, one for each source of a mixture; empty by default."""

    fields: Mapping[str, Field]  # of a source, by name
    kind: ClassVar[str] = "a section of sources, each {'weight': NUMBER, FIELD: VALUE, ...}"

    def has_type(self, value: object) -> bool:
        return isinstance(value, Mapping | config_dict.ConfigDict)

    def require_type(self, path: str, value: object) -> None:
        """Raises ConfigError, naming source and field, for a name, a field or a value that a source cannot have."""
        if not isinstance(value, Mapping | config_dict.ConfigDict):
            raise ConfigError(f"{path}={value!r} must be {self.kind}; write {path}.NAME = {{'weight': 1.0}}")
        for name in value:
            source, own = value[name], f'{path}.{name}'
            if not isinstance(name, str) or not name.isidentifier():
                raise ConfigError(f'{own}: the name of a source must be letters, digits and _, as names of Python are')
            if not isinstance(source, Mapping | config_dict.ConfigDict):
                raise ConfigError(f"{own}={source!r} must be the fields of a source, {{'weight': 1.0, 'name': TASK}}")
            for field in source:
                if field not in self.fields:
                    raise ConfigError(
                        f'{own}.{field}={source[field]!r}: a source has no such field{suggest(field, self.fields)}; it '
                        f'has {", ".join(self.fields)}, and the others of the section task hold for all sources'
                    )
                self.fields[field].require_type(f'{own}.{field}', source[field])

    def initial(self) -> object:
        return config_dict.ConfigDict()


class GroupCount(Text):
    """A number of groups: a whole number as a text, or 'all'."""

    def require_allowed(self, path: str, value: Value) -> None:
        if value != 'all' and not (isinstance(value, str) and value.isascii() and value.isdigit()):
            raise ConfigError(f'{path}={value!r} must {self.rule()}')

    def rule(self) -> str:
        return "be a whole number as a text, as '4', or 'all'"


class Lengths(_Unbounded):
    """Positive whole numbers in ascending order."""

    kind: ClassVar[str] = 'a tuple of whole numbers'

    def has_type(self, value: object) -> bool:
        return isinstance(value, tuple) and all(_is_integer(element) for element in value)

    def require_allowed(self, path: str, value: Value) -> None:
        assert isinstance(value, tuple)
        if list(value) != sorted({size for size in value if isinstance(size, int) and size > 0}):
            raise ConfigError(f'{path}={value} must {self.rule()}')

    def rule(self) -> str:
        return 'be positive whole numbers in ascending order'


class Texts(_Unbounded):
    kind: ClassVar[str] = 'a tuple of texts'

    def has_type(self, value: object) -> bool:
        return isinstance(value, tuple) and all(isinstance(element, str) for element in value)


class Hosts(Texts):
    """Names and addresses of machines."""

    def require_allowed(self, path: str, value: Value) -> None:
        assert isinstance(value, tuple)
        for text in value:
            if not name_hosts([str(text)]):
                raise ConfigError(f'{path}={value} must {self.rule()}, and {text!r} is none')

    def rule(self) -> str:
        return "be a tuple of names or addresses without scheme and port, ('gpu7', '10.0.0.5')"


class Section(Mapping[str, Field]):
    """Fields by name, under a title."""

    def __init__(self, title: str, **fields: Field):
        self.title = title
        self._fields = fields

    def __getitem__(self, name: str) -> Field:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


def declare(field: Field, **changes: Any) -> Any:
    """Returns a field of a `ConfigSection`, with the default of its declaration; `changes`: see `dataclasses.field`."""
    made = {'default': field.default, 'metadata': {_DECLARED: field}, 'compare': field.compared}
    return dataclasses.field(**(made | changes))


Parameters = ParamSpec('Parameters')


def _declaring(kind: Callable[Parameters, Field]) -> Callable[Parameters, Any]:
    """Returns a function that declares a field of this kind: real(0.5, SHARE, 'of ...') is declare(Real(...))."""

    def make(*values: Parameters.args, **more: Parameters.kwargs) -> Any:
        return declare(kind(*values, **more))

    return make


integer, real, flag = _declaring(Integer), _declaring(Real), _declaring(Flag)
choice, own_choice = _declaring(Choice), _declaring(ChoiceOrOwn)
path_text, lengths = _declaring(Path), _declaring(Lengths)
plain_text, texts = _declaring(Text), _declaring(Texts)


class ConfigSection:
    """A section of the config as the part that uses it gets it: a dataclass, each field made by `declare` or `real`.

    Raises ConfigError for a value that its field does not allow.
    """

    section: ClassVar[str]  # its name in the config
    title: ClassVar[str]  # in docs/config.md
    used_if: ClassVar[Callable[[Config], bool]] = always  # for all fields, in addition to the condition of each field

    def __post_init__(self) -> None:
        for name, field in list_fields(type(self)).items():
            field.require_allowed(f'{self.section}.{name}', getattr(self, name))


def declare_section(kind: type[ConfigSection]) -> Section:
    """Returns the fields of a section that is a dataclass, as a table."""
    return Section(kind.title, **list_fields(kind))


SectionKind = TypeVar('SectionKind', bound=ConfigSection)


def list_fields(kind: type[Any]) -> Mapping[str, Field]:
    """Returns the declarations of a section, or of another dataclass with fields of `declare`, by name."""
    return _read_declarations(cast(Hashable, kind))  # a type checker looks at the hash of its instances


@functools.cache
def _read_declarations(kind: type) -> Mapping[str, Field]:
    return {field.name: field.metadata[_DECLARED] for field in dataclasses.fields(kind) if field.metadata}


def is_used(kind: type[ConfigSection], name: str, config: Config) -> bool:
    """Tells whether a run that trains with this config uses the field."""
    return kind.used_if(config) and list_fields(kind)[name].used_if(config)


def read_section(kind: type[SectionKind], config: Config, purpose: Purpose) -> SectionKind:
    """Returns the section of a config; in a training run, a field that is not used has its default."""
    values, used = getattr(config, kind.section), {}
    for name in list_fields(kind):
        if purpose is not Purpose.TRAINING or is_used(kind, name, config):
            value = getattr(values, name)
            used[name] = tuple(value) if isinstance(value, list) else value  # of a config that was written as JSON
    return kind(**used)


def require_local(path: str, value: object) -> None:
    """Raises ConfigError for a URL in a field that holds a path."""
    if isinstance(value, str) and (reason := describe_url(value)):
        raise ConfigError(f'{path}={value!r} {reason}')


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
