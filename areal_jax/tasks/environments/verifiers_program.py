"""Lists the tasks of an environment of verifiers, or serves its episodes, in an interpreter that has verifiers.

    python verifiers_program.py tasks FILE       writes a JSON object a task to FILE, one a line
    python verifiers_program.py serve ADDRESS    serves episodes over ZMQ until it is ended

Stdin has one line of JSON: `environment` is the section [env] of verifiers; `most_tasks` bounds a taskset without an
end; `max_turns` is for the agent unless the environment sets its own; `workers` is a number of processes. The last line
on stderr says why it failed. This interpreter does not have areal_jax: only verifiers is imported.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import sys
from typing import Any

_FAILED = 2


class RefusedError(Exception):
    """Raised for an environment that cannot be used, with the reason in one sentence."""


def complete(environment: dict[str, Any], max_turns: int) -> Any:
    """Completes an environment's config: its one agent runs here, without a shell unless the config says otherwise."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import default_harness_id, resolve_env_config

    seats = list(agent_config_fields(resolve_env_config(environment)))
    if len(seats) != 1:
        raise RefusedError(f'it has the agents {", ".join(seats) or "none"}: one is trained')
    agent = environment.setdefault(seats[0], {})
    if default_harness_id(environment['taskset']['id']) == 'bash':  # the taskset brings none
        agent.setdefault('harness', {'id': 'null'})
    agent.setdefault('runtime', {'type': 'subprocess'})
    if max_turns:
        agent.setdefault('max_turns', max_turns)
    return resolve_env_config(environment)


def list_tasks(config: Any, most: int, path: pathlib.Path) -> None:
    """Writes the data of each task that a request for an episode needs."""
    from verifiers.v1.utils.loaders import load_environment

    taskset = load_environment(config).taskset
    tasks = taskset if taskset.bounded else itertools.islice(taskset, most)
    with path.open('w', encoding='utf-8') as file:
        for task in tasks:
            file.write(json.dumps(task.data.model_dump(mode='json')) + '\n')


def serve(config: Any, workers: int, address: str) -> None:
    """Serves episodes until SIGTERM."""
    from verifiers.v1.serve.pool import serve_env

    serve_env(max_workers=workers, elastic=False, address=address, config=config)


def main(mode: str, place: str) -> int:
    """Lists tasks or serves episodes; returns the exit code."""
    setup = json.loads(sys.stdin.readline())
    try:
        config = complete(setup['environment'], setup['max_turns'])
        if mode == 'tasks':
            list_tasks(config, setup['most_tasks'], pathlib.Path(place))
        else:
            serve(config, setup['workers'], place)
    except Exception as error:  # of verifiers, or of the environment's own code
        said = str(error) if isinstance(error, RefusedError) else f'{type(error).__name__}: {error}'
        print(' '.join(said.split()), file=sys.stderr)
        return _FAILED
    return 0


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
