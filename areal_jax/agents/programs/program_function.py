"""The function of `agent.function`: its possible parameters and their values."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Awaitable, Callable
from typing import TypeAlias, cast

from areal_jax.errors import UserError
from areal_jax.plugins import load_function

FIELD = 'agent.function'
CLIENT = 'client'
GIVEN = ('problem', 'base_url', 'api_key', 'model', CLIENT)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

ProgramFunction: TypeAlias = Callable[..., Awaitable[object]]


def check_function(spec: str) -> ProgramFunction:
    """Returns the function 'FILE.py:FUNCTION', an `async def` whose parameters are all in GIVEN or have a default.

    Raises UserError that names agent.function, its value and the fix.
    """
    function = load_function(spec, FIELD)
    if not inspect.iscoroutinefunction(function):
        raise UserError(f'{FIELD}={spec}: it is no `async def`, and several episodes share its process; make it one')
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise UserError(f'{FIELD}={spec}: its parameter {name!r} is positional only; leave out the `/`')
        if name not in GIVEN and parameter.kind not in _VARIABLE and parameter.default is parameter.empty:
            raise UserError(
                f'{FIELD}={spec}: nobody gives it its parameter {name!r}; name one of {", ".join(GIVEN)}, or give it a '
                'default'
            )
    if CLIENT in list_parameters(function) and importlib.util.find_spec('openai') is None:
        raise UserError(
            f'{FIELD}={spec}: its parameter {CLIENT!r} needs the package openai; install it, or take api_key and '
            'base_url'
        )
    return cast(ProgramFunction, function)


def list_parameters(function: Callable[..., object]) -> list[str]:
    """The names in GIVEN for which the function has a parameter."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.name in GIVEN and p.kind not in (*_VARIABLE, p.POSITIONAL_ONLY)]
