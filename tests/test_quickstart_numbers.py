"""What README.md and docs/first_run.md say of the quickstart: numbers of its stored report, and a field that acts."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
README, FIRST_RUN = (ROOT / 'README.md').read_text(), (ROOT / 'docs' / 'first_run.md').read_text()
REPORT = json.loads((ROOT / 'docs' / 'quickstart' / 'report.json').read_text())


def shown(score):
    """'0.06 [0.03, 0.09]'."""
    return f'{score["mean"]:.2f} [{score["low"]:.2f}, {score["high"]:.2f}]'


@pytest.mark.parametrize(('row', 'kind'), [('2 samples a problem', 'sampled'), ('greedy', 'greedy')])
def test_the_table_of_the_readme_has_the_scores_of_the_report(row, kind):
    [line] = [line for line in README.splitlines() if line.startswith('| score') and row in line]
    before, after = (REPORT['accuracy'][kind][phase] for phase in ('before', 'after'))
    assert line.replace('*', '').split(' | ')[1:] == [shown(before), f'{shown(after)} |']


def test_the_sentences_of_the_readme_have_the_shares_of_the_report():
    [text] = re.findall(r'What the quickstart gave.*?\n!\[', README, flags=re.DOTALL)
    seconds = round(REPORT['wall_seconds'])
    assert f'{seconds // 60} min {seconds % 60} s' in text
    assert f'Generation occupied its lane for {REPORT["busy"]["rollout"]:.0%}' in text
    assert f'the learner for {REPORT["busy"]["learner"]:.0%}' in text
    assert f'In {REPORT["steps_with_interruption"]} of {REPORT["steps"]} updates' in text
    versions, age = REPORT['versions_per_trajectory'], REPORT['token_age']
    assert versions['max'] == 2
    assert f'{versions["mean"] - 1:.0%} of the trained answers are of two versions' in text
    assert f'are {age["mean"]:.2g} versions old on average and {age["max"]:.0f} at most' in ' '.join(text.split())
    assert f'disagree by {REPORT["mismatch"]["mean"]:.0e}'.replace('e-0', 'e-') in text


def test_the_first_run_says_how_long_it_takes():
    assert f'about {REPORT["wall_seconds"] / 60:.0f} minutes' in ' '.join(FIRST_RUN.split())


def test_the_first_field_that_the_readme_changes_acts(tmp_path):
    """In simulations of the quickstart: synchronously no token is stale, and nothing is interrupted."""
    [(config, field)] = re.findall(r'```bash\nareal-train --config=(\S+) --workdir=\S+ (--config\S+)', README)
    ages, interrupted = [], []
    for name, changes in (('as it is', []), ('changed', [field])):
        folder = tmp_path / name
        command = [sys.executable, '-m', 'areal_jax.main_simulate', f'--config={config}', f'--workdir={folder}']
        own = ['--config.simulation.prices=virtual', '--config.run.steps=4']
        subprocess.run([*command, *own, *changes], cwd=ROOT, capture_output=True, check=True)
        rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
        ages.append(max(row.get('staleness/token_age_max', 0) for row in rows))
        interrupted.append('"kind":"interrupt"' in (folder / 'events.jsonl').read_text().replace(' ', ''))
    assert (ages, interrupted) == ([1, 0], [True, False])
