"""What `cluster.learner` and `cluster.engines` say: the sizes of the learner's mesh, and how many engines decode where.

Parsed without jax, so that `config.validate` can refuse a layout before a device is touched; `sharding/allocation.py`
then chooses the devices.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

from areal_jax.config.ranges import ConfigError
from areal_jax.config.structure import suggest

LEARNER, ENGINES, STRATEGY = 'cluster.learner', 'cluster.engines', 'cluster.strategy'
AXES = ('data', 'fsdp', 'context', 'tensor')  # of the learner's mesh
MOST_ENGINES = 1024  # each has a thread
_MOST_DEVICES = 2**31 - 1
_FORMER = {
    **{f'mesh.{axis}': LEARNER for axis in AXES},
    'mesh.strategy': STRATEGY,
    'rollout.engines': ENGINES,
    'sft.export_dtype': 'run.export_dtype',
}


@dataclasses.dataclass(frozen=True)
class LearnerLayout:
    """The sizes of the learner's mesh."""

    data: int = 1  # replicas
    fsdp: int = 1  # shards of parameters, optimizer state and batch rows
    context: int = 1  # slices of a row's tokens
    tensor: int = 1  # slices of heads, MLP and vocabulary

    def __post_init__(self) -> None:
        for axis, size in zip(AXES, self.sizes, strict=True):
            if size < 1:
                raise ConfigError(f"{LEARNER}='{axis}={size}': the size of {axis} must be a whole number, at least 1")

    @property
    def sizes(self) -> tuple[int, ...]:
        """In the order of AXES."""
        return self.data, self.fsdp, self.context, self.tensor

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)

    @property
    def data_shards(self) -> int:
        """Groups of devices that share out the rows of a micro-batch."""
        return self.data * self.fsdp

    def __str__(self) -> str:
        """As in the config: 'data=2,fsdp=2'."""
        named = [f'{axis}={size}' for axis, size in zip(AXES, self.sizes, strict=True) if size > 1]
        return ','.join(named) or 'data=1'


@dataclasses.dataclass(frozen=True)
class EnginesLayout:
    """How many engines decode in this process, and whether each has devices of its own."""

    count: int = 1
    shared: bool = True  # they decode on the learner's first device; False: on their own, after the learner's
    tensor: int = 1  # devices of each engine, over which heads, MLP and KV cache are cut

    @property
    def devices(self) -> int:
        """Devices beside the learner's."""
        return 0 if self.shared else self.count * self.tensor

    def __str__(self) -> str:
        return f'{self.count} x {"shared" if self.shared else f"tensor={self.tensor}"}'


def parse_learner(text: str) -> LearnerLayout:
    """'data=2,fsdp=2' -> the sizes of the mesh; an axis that is not named has size 1.

    Raises ConfigError for an unknown or repeated axis, and for a size that is not a positive whole number.
    """
    sizes: dict[str, int] = {}
    for part in text.split(','):
        axis, size = _parse_axis(part, LEARNER, text, "'fsdp=4' or 'data=2,fsdp=2'")
        if axis in sizes:
            raise ConfigError(f'{LEARNER}={text!r} names the axis {axis} twice; give it one size')
        sizes[axis] = size
    return LearnerLayout(**sizes)


def parse_engines(text: str) -> EnginesLayout:
    """'2 x tensor=4' -> two engines on four devices each; '2 x shared' -> two on the learner's first device.

    Raises ConfigError for a text of another form.
    """
    forms = "'2 x shared' (on the learner's first device) or '2 x tensor=1' (on one device each)"
    count, times, where = (part.strip() for part in text.partition('x'))
    if not times or not where:
        raise ConfigError(f"{ENGINES}={text!r} has no 'NUMBER x WHERE'; write {forms}")
    if not re.fullmatch(r'\d{1,10}', count) or not 1 <= int(count) <= MOST_ENGINES:
        raise ConfigError(
            f'{ENGINES}={text!r}: {count!r} engines must be a whole number from 1 to {MOST_ENGINES}; write {forms}'
        )
    if where == 'shared':
        return EnginesLayout(int(count))
    if '=' not in where:
        raise ConfigError(f'{ENGINES}={text!r}: {where!r} is not known{suggest(where, ["shared"])}; write {forms}')
    axis, size = _parse_axis(where, ENGINES, text, forms)
    if axis != 'tensor':
        raise ConfigError(
            f"{ENGINES}={text!r}: the devices of an engine share the axis tensor alone; use '{count} x tensor={size}'"
        )
    return EnginesLayout(int(count), shared=False, tensor=size)


def require_fit(learner: LearnerLayout, engines: EnginesLayout, available: int, platform: str) -> None:
    """Raises ConfigError, with both fields and the fix, where the layout needs more devices than there are."""
    needed = learner.devices + engines.devices
    if needed <= available:
        return
    own = f' and {ENGINES}={str(engines)!r} needs {engines.devices}, {needed} together' if engines.devices else ''
    more = f', or set XLA_FLAGS=--xla_force_host_platform_device_count={needed} before jax is imported'
    fix = 'lower a size' + (f", share the learner's with {ENGINES}='{engines.count} x shared'" if own else '')
    raise ConfigError(
        f'{LEARNER}={str(learner)!r} needs {learner.devices} devices{own}; the platform {platform!r} has {available}: '
        f'{fix}{more if platform == "cpu" else ""}'
    )


def describe_former(fields: Mapping[str, object]) -> str | None:
    """One sentence on what replaces fields of earlier configs, 'mesh.fsdp': 4 and so on; None where there are none."""
    named = {path: value for path, value in fields.items() if path in _FORMER}
    if not named:
        return None
    new: dict[str, str] = {}
    named = {path: 'N' if value is None else value for path, value in named.items()}  # the command line's next word
    sizes = [f'{axis}={value}' for axis in AXES if (value := named.get(f'mesh.{axis}', 1)) not in (1, '1')]
    if any(_FORMER[path] == LEARNER for path in named):
        new[LEARNER] = ','.join(sizes) or 'data=1'
    if 'mesh.strategy' in named:
        new[STRATEGY] = str(named['mesh.strategy'])
    if 'rollout.engines' in named:
        new[ENGINES] = f'{named["rollout.engines"]} x shared'
    if 'sft.export_dtype' in named:
        new['run.export_dtype'] = str(named['sft.export_dtype'])
    given = ', '.join(f'{path}={value}' for path, value in named.items())
    use = ', '.join(f'{path}={value!r}' for path, value in new.items())
    return f'{given}: {"these fields were" if len(named) > 1 else "this field was"} replaced; use {use}'


def _parse_axis(part: str, field: str, text: str, forms: str) -> tuple[str, int]:
    """'fsdp=4' -> ('fsdp', 4)."""
    axis, equals, size = (piece.strip() for piece in part.partition('='))
    if not equals:
        raise ConfigError(f"{field}={text!r}: {part.strip()!r} has no 'AXIS=SIZE'; write {forms}")
    if axis not in AXES:
        raise ConfigError(f'{field}={text!r}: there is no axis {axis!r}{suggest(axis, AXES)}; use {", ".join(AXES)}')
    if not re.fullmatch(r'\d{1,10}', size) or not 1 <= int(size) <= _MOST_DEVICES:
        raise ConfigError(f'{field}={text!r}: the size of {axis} must be a whole number, at least 1')
    return axis, int(size)
