"""The console scripts: each names a function that exists, and an installation makes commands that answer --help."""

import ast
import importlib
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
SCRIPTS = dict(re.findall(r"'(areal-[\w-]+)=([\w.]+:\w+)'", (ROOT / 'setup.py').read_text()))


def test_every_command_has_a_script():
    names = [
        'aot', 'check-log', 'config', 'eval', 'export', 'plan', 'replay', 'report', 'role', 'rollouts', 'runs', 'score',
        'serve', 'simulate', 'sweep', 'train', 'watch',
    ]  # fmt: skip
    assert sorted(SCRIPTS) == [f'areal-{name}' for name in names]
    with_run = {path.stem for path in (ROOT / 'areal_jax').glob('main_*.py') if has_run(path)}
    assert {target.removeprefix('areal_jax.').removesuffix(':run') for target in SCRIPTS.values()} == with_run


def has_run(path):
    return any(isinstance(node, ast.FunctionDef) and node.name == 'run' for node in ast.parse(path.read_text()).body)


@pytest.mark.parametrize('script', SCRIPTS)
def test_the_target_of_a_script_exists(script):
    module, _, function = SCRIPTS[script].partition(':')
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.slow
def test_an_installation_makes_working_commands(tmp_path):
    """In a virtual environment of its own, which sees the packages of this one and adds the project alone."""
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', tmp_path / 'venv'], check=True)
    python = tmp_path / 'venv' / 'bin' / 'python'
    site = subprocess.check_output([python, '-c', 'import site; print(site.getsitepackages()[0])'], text=True).strip()
    own = [path for path in sys.path if path.endswith('site-packages')]
    pathlib.Path(site, 'packages_of_the_tests.pth').write_text('\n'.join(own))
    install = ['-m', 'pip', '--disable-pip-version-check', 'install', '--quiet', '--no-deps', '--editable', ROOT]
    subprocess.run([python, *install], check=True, capture_output=True, text=True)
    commands = {script: [tmp_path / 'venv' / 'bin' / script] for script in SCRIPTS}
    commands['areal_jax.launch.local'] = [python, '-m', 'areal_jax.launch.local']  # launch/ of the clone
    environment = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    for script, command in commands.items():
        done = subprocess.run(
            [*command, '--help'], env=environment, capture_output=True, text=True, cwd=tmp_path, check=False
        )
        assert done.returncode == 0, done.stderr
        assert script in done.stdout or '--workdir' in done.stdout, script
        assert 'Traceback' not in done.stderr, script
