"""Runs with the configs of tests/hostile_configs.py: what each must end with."""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tests.chaos.outcomes import Outcome
from tests.chaos.processes import RunningCommand, python
from tests.chaos.runs import Ground, seconds_since

KIND = 'config'
_MEMORY_BYTES = 8 * 2**30  # a config of enormous sizes that is not refused must not take the machine along


@dataclasses.dataclass(frozen=True)
class ConfigCase:
    """One start with a hostile config."""

    name: str
    hostile: Any  # a HostileConfig

    def run(self, ground: Ground) -> Iterator[Outcome]:
        began, directory = time.monotonic(), ground.fresh(self.name)
        arguments = [f'--config={self.hostile.config}', f'--workdir={directory / "run"}', *self.hostile.arguments]
        limited = ['prlimit', f'--data={_MEMORY_BYTES}', *python('-m', 'areal_jax.main_train', *arguments)]
        with RunningCommand(limited, directory) as run:
            ending = run.wait()
            wrong = ending.violations((2,)) + run.orphans()
        if ending.exit_code == 2 and self.hostile.message not in ending.error:
            wrong.append(f'the sentence does not contain {self.hostile.message!r}: {ending.error}')
        seconds, detail = seconds_since(began), '; '.join(wrong)
        yield Outcome(KIND, self.name, seconds, ending.exit_code, detail, ending.trouble, str(directory))


def config_cases() -> list[ConfigCase]:
    """All of them; none where the module is absent."""
    return [ConfigCase(name, hostile) for name, hostile in _hostile_configs().items()]


def _hostile_configs() -> Mapping[str, Any]:
    try:
        return importlib.import_module('tests.config.hostile_configs').HOSTILE_CONFIGS
    except ModuleNotFoundError:
        return {}
