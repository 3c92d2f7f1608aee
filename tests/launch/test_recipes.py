"""The recipes for clusters: each config is laid out without its hardware, and the commands of its page make its job."""

import functools
import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from areal_jax.app.command_line import load_config
from areal_jax.config import validate
from areal_jax.config.loss import find_objective_warnings
from areal_jax.simulation.prices import find_chip
from launch import jobset, slurm
from tests.commands.test_shown_commands import list_shown
from tests.launch.test_jobset import faults
from tests.launch.test_local import ROOT

CONFIGS = {path.stem: path for path in sorted((ROOT / 'configs' / 'clusters').glob('[!_]*.py'))}
PAGES = ROOT / 'docs' / 'cluster' / 'recipes'
CHIPS = {'h100': 'H100', 'v5p64': 'TPU v5p'}
TAKEN = 0.92  # share of a GPU's memory that the pages let jax take
DESCRIBE = """
import json, sys
from areal_jax.app.command_line import load_config
from areal_jax.app.parts.dry_run import describe_run, plan_run
found = {}
for name in sys.argv[1:]:
    config = load_config(f'configs/clusters/{name}.py')
    config.model.path = 'configs/shapes/' + ('qwen3_30b_a3b' if '30b' in name else 'qwen3_8b')
    found[name] = describe_run(plan_run(config))
print(json.dumps(found))
"""


@functools.cache
def describe():
    """The dry run of every recipe, in one process with enough virtual devices."""
    environment = os.environ | {'XLA_FLAGS': '--xla_force_host_platform_device_count=32', 'JAX_PLATFORMS': 'cpu'}
    command = [sys.executable, '-c', DESCRIBE, *CONFIGS]
    return json.loads(subprocess.check_output(command, cwd=ROOT, env=environment, text=True).splitlines()[-1])


def count_gigabytes(name, title):
    """GB of a device by the table with this title; without the second copy of matrices, which only CPUs have."""
    table = describe()[name].partition(f'{title}, of a device')[2].partition('\n\n')[0]
    rows = re.findall(r'^(.+?)  +([\d.]+) (MB|GB)$', table, re.MULTILINE)
    left_out = ('together', 'transposed weights')
    return sum(float(size) / {'MB': 1e3, 'GB': 1}[unit] for kind, size, unit in rows if kind not in left_out)


def rows_of(page):
    """Rows of the tables of a page by their first cell."""
    lines = [line.strip('| ').split(' | ') for line in page.splitlines() if line.startswith('| ')]
    return [[cell.strip() for cell in line] for line in lines]


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_every_recipe_has_a_page_and_every_page_a_recipe():
    assert sorted(CONFIGS) == sorted(page.stem for page in PAGES.glob('*.md') if page.stem != 'index')
    assert len(CONFIGS) >= 4


@pytest.mark.parametrize('name', CONFIGS)
def test_a_recipe_is_valid_and_needs_no_warning(name):
    config = load_config(str(CONFIGS[name]))
    assert validate(config) is None
    assert list(find_objective_warnings(config)) == []
    assert config.buffer.capacity == (config.staleness.eta + 1) * config.learner.groups_per_update
    assert config.learner.row_tokens == config.rollout.context_tokens
    assert config.rollout.context_tokens - config.rollout.max_new_tokens == 1024
    assert (config.model.path.startswith('hf:'), config.task.path.startswith('hf:')) == (True, True)
    assert config.checkpoint.every > 0


@pytest.mark.parametrize('name', CONFIGS)
def test_a_recipe_fits_its_devices_with_a_margin_as_the_pages_say(name):
    memory = find_chip(next(chip for part, chip in CHIPS.items() if part in name)).memory_bytes / 1e9
    learner, engine = count_gigabytes(name, 'learner'), count_gigabytes(name, 'engine')
    assert learner < 0.5 * memory  # the other activations are not counted
    assert engine < TAKEN * memory
    own = load_config(str(CONFIGS[name])).rollout.server == 'own'
    assert (learner > 0, engine > 0) == (True, own)
    index = rows_of((PAGES / 'index.md').read_text())
    [row] = [row for row in index if row[0] == f'`{name}`' and row[1] == f'{memory:.0f}']
    assert row[2] == f'{learner:.1f}'
    assert row[3] == f'{engine:.1f}' if own else 'SGLang' in row[3]
    page = (PAGES / f'{name}.md').read_text()
    assert f'{learner:.1f} GB' in page
    assert not own or f'{engine:.1f} GB' in page


@pytest.mark.parametrize('name', CONFIGS)
def test_a_row_of_a_microbatch_for_each_device_of_the_learner(name):
    config = load_config(str(CONFIGS[name]))
    devices = 1
    for size in re.findall(r'(?:data|fsdp|expert)=(\d+)', config.cluster.learner):
        devices *= int(size)
    assert config.learner.rows_per_microbatch == devices
    assert 'leaf' in describe()[name]


def commands_of(name, program):
    page = (PAGES / f'{name}.md').read_text()
    return [words for command, words in list_shown(page) if command.program == program]


def test_each_recipe_is_submitted_by_a_command_of_its_page():
    for name in CONFIGS:
        submitted = [words for kind in ('slurm', 'jobset') for words in commands_of(name, f'python -m launch.{kind}')]
        assert submitted, name
        assert all(f'--config=configs/clusters/{name}.py' in words for words in submitted), name


SLURM = [(name, n) for name in CONFIGS for n in range(len(commands_of(name, 'python -m launch.slurm')))]
NODES = {'qwen3_8b_h100': 2, 'qwen3_8b_h100_sglang': 2, 'qwen3_30b_a3b_h100': 8}


@pytest.mark.parametrize(('name', 'number'), SLURM)
def test_the_slurm_command_of_a_page_makes_its_job(name, number, capsys):
    words = commands_of(name, 'python -m launch.slurm')[number]
    assert slurm.main(['launch.slurm', *words, *([] if '--dry_run' in words else ['--dry_run'])]) == 0
    text = capsys.readouterr().out
    assert subprocess.run(['bash', '-n'], input=text, text=True, check=False).returncode == 0
    assert f'#SBATCH --nodes={NODES[name]}\n' in text
    assert '#SBATCH --gpus-per-node=8\n' in text
    config = load_config(str(CONFIGS[name]))
    count, _, devices = config.cluster.engines.partition(' x tensor=')
    visible = re.findall(r'engine-\d+ .*?env CUDA_VISIBLE_DEVICES=(\S+)', text)
    assert len(visible) == int(count)
    assert {len(gpus.split(',')) for gpus in visible} == {int(devices)}
    assert sorted(','.join(visible).split(',')) == sorted([*map(str, range(8))] * (int(count) * int(devices) // 8))
    setup = [word.removeprefix('--setup=') for word in words if word.startswith('--setup=')]
    assert all(f'\n{line}\n' in text for line in setup)
    assert '--dry_run' in words or 'XLA_PYTHON_CLIENT_MEM_FRACTION=0.92' in text


JOBSETS = [(name, n) for name in CONFIGS for n in range(len(commands_of(name, 'python -m launch.jobset')))]


@pytest.mark.parametrize(('name', 'number'), JOBSETS)
def test_the_jobset_command_of_a_page_makes_its_yaml(name, number, capsys):
    words = commands_of(name, 'python -m launch.jobset')[number]
    assert jobset.main(['launch.jobset', *words]) == 0
    made = yaml.safe_load(capsys.readouterr().out)
    assert faults(made) == []
    jobs = {job['name']: job for job in made['spec']['replicatedJobs']}
    config = load_config(str(CONFIGS[name]))
    assert jobs['engine']['replicas'] == int(config.cluster.engines.partition(' x ')[0])
    hosts = int(re.search(r'hosts=(\d+)', config.cluster.learner)[1])
    assert jobs['learner']['template']['spec']['completions'] == hosts
    pod = jobs['learner']['template']['spec']['template']['spec']
    if 'v5p' in name:
        assert pod['nodeSelector']['cloud.google.com/gke-tpu-topology'] == '2x2x4'
        assert pod['containers'][0]['resources']['limits'] == {'google.com/tpu': 4}


def test_both_ways_are_there():
    assert {name for name, _ in SLURM} == set(NODES)
    assert {name for name, _ in JOBSETS} == {'qwen3_8b_h100', 'qwen3_8b_v5p64'}


def test_the_other_numbers_of_nodes_of_a_page_are_valid():
    """Flags in the last section of each page, laid out by the launcher of the recipe."""
    tried = 0
    for name in CONFIGS:
        section = (PAGES / f'{name}.md').read_text().partition('## Other numbers')[2]
        for span in re.findall(r'`(--(?:config|share|topology)[^`]+)`', section):
            words = [word.replace("'", '') for word in re.findall(r"(?:[^\s']|'[^']*')+", span)]
            base = commands_of(name, f'python -m launch.{"jobset" if "v5p" in name else "slurm"}')[0]
            names = {word.partition('=')[0] for word in words}
            kept = [word for word in base if word.partition('=')[0] not in names | {'--dry_run'}]
            launcher = jobset if 'v5p' in name else slurm
            assert launcher.main([launcher.__name__, *kept, *words, '--dry_run']) == 0
            tried += 1
    assert tried >= 6
