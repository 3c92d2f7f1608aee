"""configs/sweeps/eta.py: the lengths of its problems, its arms, and a short form of its runs with the page of them."""

import csv
import json
import pathlib
import re
import statistics

import pytest

from areal_jax import main_sweep
from areal_jax.app.command_line import load_config, parse_command
from areal_jax.app.library import train
from areal_jax.app.sweep.arms import read_arms
from areal_jax.tasks.registry import make_task
from areal_jax.text.tokenizer import CharacterTokenizer

FILE = 'configs/sweeps/eta.py'
SHORT = {
    'run.steps': 8, 'model.n_layers': 1, 'model.d_model': 32, 'rollout.slots': 8,
    'rollout.group_size': 4, 'learner.groups_per_update': 4, 'telemetry.plots': False,
}  # fmt: skip
ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def in_the_clone(monkeypatch):
    monkeypatch.chdir(ROOT)


def read_short_arms(workdir):
    words = [f'--config.{path}={value}' for path, value in SHORT.items()]
    argv = ['main_sweep', f'--config={FILE}', f'--workdir={workdir}', *words]
    return read_arms(parse_command(argv, main_sweep.define_flags()), workdir)


def test_the_arms_are_six_etas_of_three_seeds_and_differ_in_nothing_else(tmp_path):
    arms = {arm.name: arm for arm in read_short_arms(tmp_path)}
    assert list(arms) == [f'eta{eta}_seed{seed}' for eta in ('0', '1', '2', '4', '8', 'inf') for seed in range(3)]
    assert arms['etainf_seed1'].config.staleness.eta == float('inf')
    assert {tuple(arm.overrides) for arm in arms.values()} == {('staleness.eta', 'run.seed')}


def test_the_lengths_have_a_long_tail_and_every_answer_fits(tmp_path):
    config = load_config(FILE)
    problems = make_task(config.task.name, CharacterTokenizer('ab='), {}).problems['train']
    lengths = [len(problem['answer']) for problem in problems]
    # of a lognormal distribution with sigma 0.7 the 95th percentile is exp(0.7 * 1.645) = 3.16 medians
    assert statistics.median(lengths) == 4
    assert sorted(lengths)[round(0.95 * len(lengths))] == 13
    assert max(lengths) < config.rollout.max_new_tokens
    assert all(problem['question'] == f'{problem["answer"][::-1]}=' for problem in problems)


def test_ages_and_throughput_grow_with_eta_and_the_page_has_the_numbers_of_the_reports(tmp_path):
    arms = [arm for arm in read_short_arms(tmp_path) if arm.name in ('eta0_seed0', 'eta2_seed0')]
    for arm in arms:
        train(arm.config, arm.workdir)
    results = main_sweep.write_results(FILE, arms, tmp_path)
    reports = [json.loads((arm.workdir / 'report.json').read_text()) for arm in arms]
    synchronous, asynchronous = reports
    assert synchronous['token_age'] == {'mean': 0, 'max': 0}
    assert 0.5 < asynchronous['token_age']['mean'] <= 2
    speeds = [report['throughput']['train_tokens_per_second'] for report in reports]
    assert speeds[1] > 1.3 * speeds[0]
    rows = [row for row in csv.DictReader((tmp_path / 'results.csv').open()) if row['row'] == 'arm']
    for row, report, speed in zip(rows, reports, speeds, strict=True):
        assert (float(row['token_age']), float(row['token_age_max'])) == tuple(report['token_age'].values())
        assert float(row['tokens_per_second']) == speed
    names = [endpoint.name for endpoint in results.endpoints]
    for page, line in (('results.md', r'\| {} \| (.*)\|'), ('results.html', r'{}</th>(.*)</tr>')):
        for arm, report, speed in zip(arms, reports, speeds, strict=True):
            cells = re.search(line.format(arm.name), (tmp_path / page).read_text())[1]
            shown = re.split(r' \| |</td><td>', cells.strip().removeprefix('<td>'))[2:]  # behind seed and state
            found = dict(zip(names, shown, strict=False))
            assert found['token_age'] == f'{report["token_age"]["mean"]:.3f}'
            assert found['token_age_max'] == f'{report["token_age"]["max"]:.3f}'
            assert found['tokens_per_second'] == f'{speed:.3g}'
