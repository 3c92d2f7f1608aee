"""README.md, docs/first_run.md and the files around them: numbers of stored results, code that runs, one version."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import areal_jax
from areal_jax import main_simulate
from areal_jax.app.command_line import parse_train_command
from areal_jax.app.simulate.simulated_site import build_simulation

ROOT = pathlib.Path(__file__).parent.parent
README, FIRST_RUN = (ROOT / 'README.md').read_text(), (ROOT / 'docs' / 'first_run.md').read_text()
REPORT = json.loads((ROOT / 'docs' / 'quickstart' / 'report.json').read_text())
MOST_BYTES = 9000
SHORT_RUN = """
from areal_jax.app.command_line import load_config

def get_config():
    config = load_config('tiny_cpu')
    config.run.steps = 3
    return config
"""


def shown(score):
    """'0.06 [0.03, 0.09]'."""
    return f'{score["mean"]:.2f} [{score["low"]:.2f}, {score["high"]:.2f}]'


def test_it_is_short_and_begins_with_the_two_commands():
    assert len(README.encode()) <= MOST_BYTES
    commands = re.search(r'```bash\n(.*?)```', README, re.DOTALL)[1].splitlines()
    assert [line.partition('#')[0].strip() for line in commands] == ['bash launch/quickstart.sh', 'bash launch/test.sh']


def test_the_sentences_of_the_readme_have_the_numbers_of_the_report():
    [text] = re.findall(r'\nThe picture is from.*?\n\n', README, flags=re.DOTALL)
    seconds = round(REPORT['wall_seconds'])
    assert f'{seconds // 60} min {seconds % 60} s' in text
    before, after = (REPORT['accuracy']['sampled'][phase] for phase in ('before', 'after'))
    assert f'from {shown(before)} to {shown(after)}' in ' '.join(text.replace('*', '').split())
    assert f'In {REPORT["steps_with_interruption"]} of {REPORT["steps"]} updates' in text
    low, high = re.search(r'gained (\S+) to (\S+) ', text).groups()
    assert float(low) <= round(after['mean'] - before['mean'], 2) <= float(high)


def test_the_ranges_next_to_vllm_have_the_stored_results():
    """A measurement outside of a range widens it; one inside may come from a machine whose file is not stored."""
    ranges = re.findall(r'([\d.]+)x to ([\d.]+)x', README)
    for cell, (low, high) in zip(('equal', 'lognormal'), ranges, strict=True):
        stored = [
            row['ratio_cpu']
            for name in ('generation_row1', 'generation_row1_amd')
            for row in json.loads((ROOT / f'benchmarks/results/{name}.json').read_text())['rows']
            if row['cell'] == cell
        ]
        assert len(stored) == 2
        assert float(low) <= round(min(stored), 2)
        assert round(max(stored), 2) <= float(high)


def test_the_first_run_says_how_long_it_takes():
    assert f'about {REPORT["wall_seconds"] / 60:.0f} minutes' in ' '.join(FIRST_RUN.split())


@pytest.mark.whole
def test_the_python_of_the_readme_runs(tmp_path):
    """With three updates instead of the 200 of tiny_cpu."""
    [code] = re.findall(r'```python\n(.*?)```', README, re.DOTALL)
    assert len([line for line in code.splitlines() if line]) == 5
    (tmp_path / 'short.py').write_text(SHORT_RUN)
    short = code.replace("'tiny_cpu'", "'short.py'")
    assert short != code
    path = os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])
    done = subprocess.run(
        [sys.executable, '-c', short],
        cwd=tmp_path,
        env={**os.environ, 'PYTHONPATH': path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "{'before': " in done.stdout
    assert (tmp_path / 'runs/tiny_eval/results.json').is_file()
    assert (tmp_path / 'exports/tiny/model.safetensors').is_file()


def test_the_first_field_that_the_readme_changes_acts(tmp_path, monkeypatch):
    """In simulations of the quickstart: synchronously no token is stale, and nothing is interrupted."""
    [(config, field)] = re.findall(r'```bash\nareal-train --config=(\S+) --workdir=\S+ (--config\S+)', README)
    monkeypatch.chdir(ROOT)
    ages, interrupted = [], []
    for name, changes in (('as it is', []), ('changed', [field])):
        folder = tmp_path / name
        words = ['areal-simulate', f'--config={config}', f'--workdir={folder}', *changes]
        own = ['--config.simulation.prices=virtual', '--config.run.steps=4', '--config.telemetry.plots=False']
        command = parse_train_command([*words, *own], main_simulate.COMMAND.flags())
        build_simulation(command.config, folder, overrides=command.overrides).train()
        rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
        ages.append(max(row.get('staleness/token_age_max', 0) for row in rows))
        interrupted.append('"kind":"interrupt"' in (folder / 'events.jsonl').read_text().replace(' ', ''))
    assert (ages, interrupted) == ([1, 0], [True, False])


@pytest.mark.parametrize(
    ('name', 'pattern'),
    [
        ('CITATION.cff', r'^version: (\S+)$'),
        ('CHANGELOG.md', r'^## (\S+)'),
        ('areal_jax/installation.py', "^__version__ = '(.+)'"),
    ],
)
def test_every_file_has_the_same_version(name, pattern):
    assert re.search(pattern, (ROOT / name).read_text(), re.MULTILINE)[1] == areal_jax.__version__
