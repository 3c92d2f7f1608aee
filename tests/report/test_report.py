from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any, cast

import pytest

from areal_jax.report.pages.run_page import render_page
from areal_jax.report.report import build_report, write_report
from tests.telemetry.logs import event_log, two_facts, two_metrics, two_updates


@pytest.fixture(scope='module')
def report() -> dict[str, Any]:
    return build_report(two_updates(), two_metrics(), two_facts())


def test_the_keys_are_the_contract(report: dict[str, Any]):
    def keys(value: Any) -> Any:
        return {name: keys(entry) for name, entry in value.items()} if isinstance(value, dict) else None

    interval, work = dict.fromkeys(('mean', 'low', 'high', 'n')), dict.fromkeys(('tokens', 'seconds'))
    expected = {
        'groups': {
            'drawn': None,
            'trained': None,
            'filtered': None,
            'dropped': {'over_age': None},
            'filtered_rate': None,
        },
        'admission_held': dict.fromkeys(('eta', 'max_running_groups')),
        'idle_slots': dict.fromkeys(('max_running_groups',)),
        'tokens': dict.fromkeys(('generated', 'trained')),
        'optimizer_steps': dict.fromkeys(('applied', 'skipped')),
        'reward': dict.fromkeys(('first', 'last')),
        'unparsed_rate': dict.fromkeys(('first', 'last', 'mean')),
        'audit': None,
        'sandbox': None,
        'ends': {},
        'agents': None,
        'accuracy': {
            'greedy': {'before': interval, 'after': interval},
            'sampled': {'before': interval, 'after': interval, 'gain': interval},
        },
        'most_frequent_answer_share': dict.fromkeys(('before', 'after')),
        'token_age': dict.fromkeys(('mean', 'max')),
        'versions_per_trajectory': dict.fromkeys(('mean', 'max')),
        'publish_pause_seconds': dict.fromkeys(('median', 'max')),
        'request_pause_seconds': dict.fromkeys(('median', 'max')),
        'engine_work': {'generated': work, 'prefilled': work, 'rebuilt': None},
        'mismatch': dict.fromkeys(('mean', 'max', 'exact_share', 'n')),
        'token_age_steps': dict.fromkeys(('mean', 'max', 'inside_mean', 'inside_max')),
        'token_age_histograms': dict.fromkeys(('publications', 'steps')),
        'throughput': dict.fromkeys(
            (
                *('generate_tokens_per_second', 'train_tokens_per_second', 'mfu'),
                *('generate_tokens_per_second_per_device', 'learner_tokens_per_second_per_device'),
            )
        ),
        'hook': {},
        'tracker': {},
        'busy': dict.fromkeys(('rollout', 'learner')),
        'time': dict.fromkeys(('generate', 'train', 'publish', 'ideal', 'achieved', 'ideal_rule')),
        'event_loop_lag_seconds': {'max': None},
        'versions': {'jax': None},
        'revisions': {},
        'hardware': {'cores': None, 'platform': None},
        'devices': {'learner': None, 'engines': {'engine/0': None}},
        'problems': dict.fromkeys(('train', 'held_out', 'dropped')),
        'memory_parts': {},
    }
    plain = (
        'steps wall_seconds interruptions steps_with_interruption compilations peak_memory_bytes weights_sha256 '
        'git_commit config seed eta clock objective simulation window_seconds cause_of_gap warnings '
        'planned_steps finished running missing newest_checkpoint attempts schedule idle_fields prolonged '
        'evaluation_curve evaluation_curve_ends evaluation_lane_share evaluation_cache_bytes '
        'attention_positions preemptions kv_cache_bytes servers token_fates censoring ratios_by_age ratio_split '
        'publications code experts energy'
    )
    assert keys(report) == expected | dict.fromkeys(plain.split())


def test_groups_tokens_reward(report: dict[str, Any]):
    # draws 0..4: two trained, one dropped, one running, one pending; trained and filtered are from the metrics
    # tokens 8 + 8 + 4 + 3 in the window and 5 after it, the evaluations' 200 left out
    assert (report['steps'], report['wall_seconds']) == (2, 40.0)
    dropped = {'dropped': {'over_age': 1}, 'filtered_rate': None}
    assert report['groups'] == {'drawn': 5, 'trained': 2, 'filtered': 1, **dropped}
    assert report['tokens'] == {'generated': 28, 'trained': 16}
    assert report['reward'] == {'first': 0.25, 'last': 0.75}


def test_accuracy(report: dict[str, Any]):
    # greedy 1 of 3, then 3 of 3; sampled means (.5 + 0 + 0) / 3 = 1/6 and (1 + 0 + 1) / 3 = 2/3; gain 1/2
    accuracy = report['accuracy']
    assert accuracy['greedy']['before']['mean'] == pytest.approx(1 / 3)
    assert accuracy['greedy']['after']['mean'] == 1.0
    assert accuracy['greedy']['after']['high'] == 1.0
    assert accuracy['sampled']['before']['mean'] == pytest.approx(1 / 6)
    assert accuracy['sampled']['after']['mean'] == pytest.approx(2 / 3)
    assert accuracy['sampled']['gain']['mean'] == pytest.approx(1 / 2)
    assert accuracy['sampled']['gain']['high'] == pytest.approx(1 / 2 + 1.242069, abs=1e-6)  # see test_statistics
    assert report['most_frequent_answer_share'] == {'before': 0.5, 'after': 0.6}


def test_staleness_and_interruption(report: dict[str, Any]):
    # 12 tokens of age 0 and 4 of age 1: 4 / 16; versions 1 and 2 with two trajectories each; pauses .5 and .1
    # (that of the first weights is no pause); version 2 met an idle engine, which is no interruption
    assert report['token_age'] == {'mean': 0.25, 'max': 1}
    assert report['versions_per_trajectory'] == {'mean': 1.5, 'max': 2}
    assert (report['interruptions'], report['steps_with_interruption']) == (1, 1)
    assert report['publish_pause_seconds'] == pytest.approx({'median': 0.3, 'max': 0.5})


def test_mismatch_is_weighted_by_tokens(report: dict[str, Any]):
    # (10 * .04 + 30 * .08) / 40 = .07, (10 * .5 + 30 * .9) / 40 = .8
    assert report['mismatch'] == pytest.approx({'mean': 0.07, 'max': 0.5, 'exact_share': 0.8, 'n': 40})


def test_mismatch_by_engine_where_there_are_several():
    def of(engine: int, n: float, mean: float) -> dict[str, float]:
        return {f'mismatch/of/engine/{engine}/n': n, f'mismatch/of/engine/{engine}/mean_abs': mean}

    first, second = two_metrics()
    metrics = [first | of(0, 4, 0.1) | of(1, 6, 0.0), second | of(0, 12, 0.02) | of(1, 18, 0.12)]
    found = build_report(two_updates(), metrics, two_facts())
    # (4 * .1 + 12 * .02) / 16 = .04, (6 * 0 + 18 * .12) / 24 = .09
    assert found['mismatch']['by_engine']['engine/0'] == pytest.approx({'mean': 0.04, 'n': 16})
    assert found['mismatch']['by_engine']['engine/1'] == pytest.approx({'mean': 0.09, 'n': 24})
    one = [{key: value for key, value in line.items() if 'engine/1' not in key} for line in metrics]
    assert 'by_engine' not in build_report(two_updates(), one, two_facts())['mismatch']
    assert '| mean mismatch of engine/1 | 0.09 nats (n = 24) |' in render_page(found, ())


def test_what_engines_in_8_bits_cost_is_weighted_by_tokens_and_has_a_line():
    of = lambda kl, left, share: {
        'mismatch/kl': kl, 'mismatch/effective_sample_size': left, 'mismatch/ratio_share': share,
    }  # fmt: skip
    first, second = two_metrics()
    found = build_report(two_updates(), [first | of(0.02, 0.8, 1.0), second | of(0.06, 1.0, 0.6)], two_facts())
    # (10 * .02 + 30 * .06) / 40 = .05, (10 * .8 + 30 * 1) / 40 = .95, (10 * 1 + 30 * .6) / 40 = .7
    expected = {'kl': 0.05, 'effective_sample_size': 0.95, 'ratio_share': 0.7}
    assert found['mismatch']['quantized'] == pytest.approx(expected)
    assert 'share of the ratio | 0.05 nats / 95% / 70% |' in render_page(found, ())


def test_mismatch_of_no_token_is_null():
    metrics = [{**line, 'mismatch/n': 0.0} for line in two_metrics()]
    found = build_report(two_updates(), metrics, two_facts())
    assert found['mismatch'] == {'mean': None, 'max': None, 'exact_share': None, 'n': 0}
    assert any('mismatch' in warning for warning in found['warnings'])


def test_optimizer_steps_are_summed(tmp_path: pathlib.Path):
    # 2 of 2 applied, then 1 of 2
    write_logs(tmp_path, (2.0, 0.0), (1.0, 1.0))
    assert write_report(tmp_path, two_facts(), plots=False)['optimizer_steps'] == {'applied': 3, 'skipped': 1}
    assert json.loads((tmp_path / 'report.json').read_text())['optimizer_steps'] == {'applied': 3, 'skipped': 1}
    page = (tmp_path / 'report.md').read_text()
    assert '| optimizer steps, applied / skipped (gradient not finite) | 3 / 1 |' in page
    assert '- 1 of 4 optimizer steps were skipped' in page


def test_rates_and_time(report: dict[str, Any]):
    # window 20 s: 23 / 20 and 16 / 20 tokens a second; lanes and ideal: see test_limit
    assert report['window_seconds'] == 20
    rates = {'generate_tokens_per_second': 1.15, 'train_tokens_per_second': 0.8}
    assert {name: report['throughput'][name] for name in rates} == pytest.approx(rates)
    assert not any(rate for name, rate in report['throughput'].items() if name not in rates)  # of devices: not measured


def test_rates_per_device_are_medians_over_the_updates():
    rates = {'rollout/tokens_per_second_per_device': (40, 50), 'learner/tokens_per_second_per_device': (300, 500)}
    rates |= {'learner/mfu': (0.2, 0.5)}
    lines = [line | {name: values[i] for name, values in rates.items()} for i, line in enumerate(two_metrics())]
    report = build_report(two_updates(), lines, two_facts())
    throughput = report['throughput']
    assert throughput['generate_tokens_per_second_per_device'] == 45
    assert throughput['learner_tokens_per_second_per_device'] == 400
    assert throughput['mfu'] == 0.35
    page = render_page(report, [])
    assert '| tokens per second and device: generated / read by an update | 45 / 400 |' in page
    assert '| model FLOPs utilisation of an update | 35% |' in page
    assert report['busy'] == pytest.approx({'rollout': 0.9, 'learner': 0.475})
    assert (report['time']['ideal'], report['time']['achieved']) == (pytest.approx(8), pytest.approx(10))


def test_evaluation_off_is_null():
    found = build_report(two_updates(), two_metrics(), two_facts(evaluation_before=None, evaluation_after=None))
    assert found['accuracy'] is None
    assert found['most_frequent_answer_share'] == {'before': None, 'after': None}


def test_a_run_that_stopped_early_has_no_gain():
    found = build_report(two_updates(), two_metrics(), two_facts(evaluation_after=None))
    assert found['accuracy']['greedy']['before']['n'] == 3
    assert found['accuracy']['greedy']['after'] is None
    assert found['accuracy']['sampled']['gain'] is None


@pytest.mark.parametrize('events', [[], event_log((0.0, 'draw', {'draw': 0}))])
def test_a_run_that_did_nothing_still_has_a_report(tmp_path: pathlib.Path, events: list[dict[str, Any]]):
    (tmp_path / 'events.jsonl').write_text(''.join(json.dumps(event) + '\n' for event in events))
    found = write_report(tmp_path, two_facts(evaluation_before=None, evaluation_after=None))
    assert (found['steps'], found['tokens']['generated']) == (0, 0)
    assert (found['token_age']['max'], found['time']['achieved'], found['busy']['learner']) == (None, None, None)
    assert '![' not in (tmp_path / 'report.md').read_text()


def test_admission_is_put_down_to_bounds(tmp_path: pathlib.Path, report: dict[str, Any]):
    # closed for 8 + 2 s by eta and for 6 s by the running groups, of a window of 20 s
    assert report['admission_held'] == {'eta': 0.5, 'max_running_groups': 0.3}
    assert report['idle_slots'] == {'max_running_groups': 0.05}  # 2 of two slots times 20 s
    write_logs(tmp_path)
    write_report(tmp_path, two_facts(), plots=False)
    assert '(share of the time) | eta 50%, max_running_groups 30% |' in (tmp_path / 'report.md').read_text()
    assert '(share of slot time) | max_running_groups 5% |' in (tmp_path / 'report.md').read_text()


def test_a_lock_step_run_shows_its_schedule_and_no_eta(tmp_path: pathlib.Path):
    write_logs(tmp_path)
    found = write_report(tmp_path, two_facts(eta=None, schedule='fixed(2)'), plots=False)
    assert (found['eta'], found['schedule']) == (None, 'fixed(2)')
    page = (tmp_path / 'report.md').read_text()
    assert 'seed 7, schedule fixed(2), real clock' in page
    assert 'eta' not in page.replace('eta 50%', '')


def test_idle_fields_and_prolongations_are_told(tmp_path: pathlib.Path):
    write_logs(tmp_path)
    prolonged = ({'at_update': 60, 'from_steps': 60, 'to_steps': 80},)
    facts = two_facts(idle_fields=('lora.alpha', 'optimizer.b2'), prolonged=prolonged)
    found = write_report(tmp_path, facts, plots=False)
    assert (found['idle_fields'], found['prolonged']) == (['lora.alpha', 'optimizer.b2'], list(prolonged))
    page = (tmp_path / 'report.md').read_text()
    assert 'The run was prolonged from 60 to 80 updates at update 60.' in page
    assert 'Fields of the config file that this run does not use: lora.alpha, optimizer.b2.' in page


def test_the_objective_and_its_warnings_are_told(tmp_path: pathlib.Path):
    write_logs(tmp_path)
    found = write_report(
        tmp_path,
        two_facts(objective='dg (a paper): surrogate delight', warnings=('One.',), ends={'2': '</s>', '7': '<|eot|>'}),
        plots=False,
    )
    assert found['objective'] == 'dg (a paper): surrogate delight'
    assert cast(list[str], found['warnings'])[-1] == 'One.'
    page = (tmp_path / 'report.md').read_text()
    assert 'It optimizes dg (a paper): surrogate delight.' in page
    assert found['ends'] == {'2': '</s>', '7': '<|eot|>'}
    assert 'An answer ends with `</s>` (token 2) or `<|eot|>` (token 7).' in page
    assert '- One.\n' in page


def test_pictures_replace_their_file_as_a_whole(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    from areal_jax import files

    write_logs(tmp_path)
    written = []
    whole = files.write_bytes
    monkeypatch.setattr(files, 'write_bytes', lambda path, data: (written.append(path.name), whole(path, data)))
    write_report(tmp_path, two_facts())
    made = {path.name for path in tmp_path.rglob('*') if path.is_file()} - {'events.jsonl', 'metrics.jsonl'}
    assert made == set(written)
    assert {'reward.png', 'report.json', 'report.md', 'timeline.json'} <= made


def write_logs(workdir: pathlib.Path, *optimizer_steps: tuple[float, float]) -> None:
    (workdir / 'events.jsonl').write_text(''.join(json.dumps(event) + '\n' for event in two_updates()))
    lines = two_metrics(*optimizer_steps)
    (workdir / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))


def test_the_page_tells_the_run(tmp_path: pathlib.Path):
    write_logs(tmp_path)
    write_report(tmp_path, two_facts(), plots=False)
    page = (tmp_path / 'report.md').read_text()
    for expected in (
        '`configs/two.py`, seed 7, eta 1, real clock: 2 updates in 40 s of wall time',
        'On 2 cores, platform Linux.',
        '| held-out accuracy, sampled | 0.167 [',
        '| +0.500 [-0.742, +1.742] (n = 3) |',
        '| achieved | 10 (80% of what was possible) |',
        '| dropped: over_age | 1 |',
        '- 1 of 5 groups were dropped',
        'the gap of 2 s is',
        '3.00 GiB',
        'jax 0.10.2',
    ):
        assert expected in page
    assert '12 problems to train on, 3 held out, 2 dropped because their prompts are too long.' in page
    assert '![' not in page
    assert json.loads((tmp_path / 'report.json').read_text())['steps'] == 2
    assert json.loads((tmp_path / 'timeline.json').read_text())['traceEvents']


def test_telemetry_loads_nothing_heavy():
    program = (
        'import pkgutil, importlib, sys, areal_jax.telemetry as t, areal_jax.app.run.reports\n'
        'for m in pkgutil.iter_modules(t.__path__): importlib.import_module(f"areal_jax.telemetry.{m.name}")\n'
        'heavy = {"jax", "jaxlib", "flax", "matplotlib", "tensorboardX", "psutil", "scipy"} & set(sys.modules)\n'
        'assert not heavy, heavy\n'
        'assert "areal_jax.report.pages.pictures" in sys.modules'
    )
    subprocess.run([sys.executable, '-c', program], check=True)
