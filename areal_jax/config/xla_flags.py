"""`cluster.xla_flags`: flags of XLA's compilers, and the presets that 'auto' has for each kind of hardware.

Flags are in a variable of the environment, which XLA reads when jax starts its backend (app/process/accelerator.py),
or options of one compilation (aot/). A compiler for CPUs gets none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeAlias

from ml_collections import config_dict

from areal_jax.config.fields import ConfigError, Text, Value
from areal_jax.errors import suggest

Flags: TypeAlias = Mapping[str, str]  # value by name, without dashes

FIELD, AUTO, OFF = 'cluster.xla_flags', 'auto', 'off'
GPU = 'gpu'  # the other kinds of hardware are generations of TPU, 'v5p'
_FLAG = re.compile(r'(?:--)?(\w+)=(\S+)')
_FORMS = f"use '{AUTO}', '{OFF}', or flags: 'name=value name=value'"
# which XLA honours at the cost of speed, so that equal runs have equal bits
_REPEATS = ('xla_gpu_deterministic_ops', 'xla_gpu_exclude_nondeterministic_ops')

_OF_GPUS: Flags = {
    'xla_gpu_enable_latency_hiding_scheduler': 'true',
    'xla_gpu_enable_pipelined_all_gather': 'true',
    'xla_gpu_enable_pipelined_reduce_scatter': 'true',
    'xla_gpu_enable_pipelined_all_reduce': 'true',
    'xla_gpu_enable_while_loop_double_buffering': 'true',
    # of the smaller side: small arrays go together, the large ones of a layer alone, so that each has kernels beside it
    'xla_gpu_all_gather_combine_threshold_bytes': '8388608',
    'xla_gpu_reduce_scatter_combine_threshold_bytes': '8388608',
}
_OF_TPUS: Flags = {  # on by themselves in libtpu 0.0.42.1
    'xla_tpu_enable_latency_hiding_scheduler': 'true',
    'xla_enable_async_all_gather': 'true',
    'xla_enable_async_collective_permute': 'true',
}
PRESETS: Mapping[str, Flags] = {GPU: _OF_GPUS, **dict.fromkeys(('v5p', 'v5e', 'v6e', 'v7x'), _OF_TPUS)}


class FlagsText(Text):
    """'auto', 'off', or flags of XLA as 'name=value name=value'."""

    def require_allowed(self, path: str, value: Value) -> None:
        if value not in (AUTO, OFF):
            parse_flags(str(value), path)

    def rule(self) -> str:
        return f"be '{AUTO}', '{OFF}', or flags: 'name=value name=value'"


def parse_flags(text: str, field: str = FIELD) -> dict[str, str]:
    """'xla_a=1 --xla_b=true' -> {'xla_a': '1', 'xla_b': 'true'}.

    Raises ConfigError for a text without flags, a word of another form, and a flag that is named twice.
    """
    flags: dict[str, str] = {}
    for word in text.split():
        match = _FLAG.fullmatch(word)
        if match is None:
            raise ConfigError(f'{field}={text!r}: {word!r} is no flag{suggest(word, (AUTO, OFF))}; {_FORMS}')
        if match[1] in flags:
            raise ConfigError(f'{field}={text!r} names {match[1]} twice; give it one value')
        flags[match[1]] = match[2]
    if not flags:
        raise ConfigError(f'{field}={text!r} has no flags; {_FORMS}')
    return flags


def write_flags(flags: Flags) -> str:
    """{'xla_a': '1'} -> '--xla_a=1', as variables of the environment have it."""
    return ' '.join(f'--{name}={value}' for name, value in flags.items())


def name_variable(hardware: str) -> str:
    """The variable of the environment from which the compiler for this hardware reads flags."""
    return 'XLA_FLAGS' if hardware == GPU else 'LIBTPU_INIT_ARGS'


def read_variable(hardware: str, environment: Mapping[str, str]) -> Flags:
    """The flags that the user has set in the environment; a flag without a value has ''."""
    words = environment.get(name_variable(hardware), '').split()
    return {name: value for name, _, value in (word.lstrip('-').partition('=') for word in words)}


def names_file(hardware: str, environment: Mapping[str, str]) -> bool:
    """Whether the variable has the name of a file with flags in place of flags, which XLA_FLAGS may."""
    text = environment.get(name_variable(hardware), '').strip()
    return bool(text) and not text.startswith('-')


def choose_flags(config: config_dict.ConfigDict, hardware: str, environment: Mapping[str, str]) -> Flags:
    """The flags that the config adds to those of the environment, which win.

    'auto' adds nothing where equal bits are asked for, by run.clock='virtual' or by XLA's own flags: such runs keep the
    programs with which they are compared.

    Args:
      hardware: GPU or a generation of TPU; '' = a CPU, which has no flags.
    """
    text, given = config.cluster.xla_flags, read_variable(hardware, environment)
    if not hardware or text == OFF or names_file(hardware, environment):
        return {}
    if text != AUTO:
        chosen: Flags = parse_flags(text)
    else:
        repeats = config.run.clock == 'virtual' or any(_is_on(given, name) for name in _REPEATS)
        chosen = {} if repeats else PRESETS.get(hardware, {})
    return {name: value for name, value in chosen.items() if name not in given}


def _is_on(flags: Flags, name: str) -> bool:
    return flags.get(name, 'false').lower() not in ('false', '0')


def describe_flags(config: config_dict.ConfigDict, added: Flags, given: Flags) -> str:
    """'auto, --xla_a=1; of the environment: --xla_b=2': what a compiler uses, for the start of a run."""
    own = f'; of the environment: {write_flags(given)}' if given else ''
    text = config.cluster.xla_flags
    return f'{text if text in (AUTO, OFF) else "own"}, {write_flags(added) or "none"}{own}'
