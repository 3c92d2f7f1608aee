"""The user's own functions that a config names: loaded before a run writes anything, and noted in its workdir.

areal_jax/plugins.py loads them.
"""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Iterator, Mapping

import numpy as np
from ml_collections import config_dict

from areal_jax import files
from areal_jax.config.kinds import CHANNEL, SERVER
from areal_jax.config.objectives import FIELD as OBJECTIVE
from areal_jax.config.objectives import find_objective, is_policy
from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.learning.objective.advantages import own_advantages
from areal_jax.plugins import is_own, load_function, source_file
from areal_jax.types import Prompt, Trajectory, TrajectoryGroup

FILE = 'own_code.json'  # in the workdir

Digests = Mapping[str, Mapping[str, str]]  # by config field: {'function': ..., 'file': ..., 'sha256': ...}


def load_own_code(config: config_dict.ConfigDict) -> Digests:
    """Loads every own function that the run uses, and says which file each comes from.

    An own advantage is called once, with rewards 0 and 1 in groups of the size that the run has.
    Raises UserError for a function that cannot be loaded, and an advantage that does not return one number a reward.
    """
    found = {}
    for field, spec in _own_functions(config):
        function = load_function(spec, field)
        if field == OBJECTIVE:
            from areal_jax.learning.objective.objectives import load_objective  # imports jax

            load_objective(spec, dict(config.loss.options))
        if field == 'loss.advantage':
            own_advantages(_example(config), function, PolicyChoices(advantage=spec))
        if (file := source_file(spec, field)) is not None:
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            found[field] = {'function': spec, 'file': str(file), 'sha256': digest}
    return found


def note_own_code(workdir: pathlib.Path, found: Digests, *, resume: bool) -> None:
    """Writes the digests to the workdir. A resumed run goes on with files that were changed, and says so."""
    path = workdir / FILE
    before = files.read_json(path, 'remove it: a resume writes it again') if resume and path.exists() else {}
    for field, now in found.items():
        earlier = before.get(field, now)
        if earlier['sha256'] != now['sha256']:
            print(
                f'warning: {field}={now["function"]}: {now["file"]} was changed since the run used it last (sha256 '
                f'{earlier["sha256"][:12]} -> {now["sha256"][:12]}); the run goes on with the new one',
                flush=True,
            )
    if found or before:
        files.write_json(path, found)


def _own_functions(config: config_dict.ConfigDict) -> Iterator[tuple[str, str]]:
    """(field, spec)."""
    fields = ['task.name', 'telemetry.hook']
    fields.append(OBJECTIVE)
    if find_objective(config.loss.objective).generates:
        fields += ['task.reward', 'rollout.workflow', SERVER, CHANNEL]
    if is_policy(config.loss.objective):
        fields.append('loss.advantage')
    for field in fields:
        section, _, name = field.partition('.')
        spec = config[section][name]
        if is_own(spec):
            yield field, spec
        elif field == 'task.reward' and spec:
            load_function(spec, field)  # raises: there are no named rewards


def _example(config: config_dict.ConfigDict) -> list[TrajectoryGroup]:
    """An update of full groups whose rewards alternate between 0 and 1."""
    prompt = Prompt(0, np.zeros(0, np.int32), '', {})
    answers = [Trajectory(prompt, i, (), float(i % 2), 'stop', '', 0.0, 0.0) for i in range(config.rollout.group_size)]
    return [TrajectoryGroup(draw, tuple(answers)) for draw in range(config.learner.groups_per_update)]
