"""areal-rollouts on what a run and an evaluation leave, and on what is none; it imports no jax."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from areal_jax import main_rollouts
from areal_jax.telemetry.rollout_views import ORDERS
from tests.telemetry.test_rollout_writer import write


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main_rollouts.main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def test_a_run_is_shown_and_its_torn_line_is_not(tmp_path: pathlib.Path, capsys):
    write(tmp_path, range(1, 5))
    path = tmp_path / 'rollouts' / '000001.jsonl'
    path.write_bytes(path.read_bytes() + b'{"update": 5')  # a run under way, or killed
    code, out, _ = call(capsys, str(tmp_path))
    assert code == 0
    assert '4 groups of updates 1 to 4, 8 answers' in out
    assert [line.split()[:4] for line in out.splitlines()[1:3]] == [['4', '8', '0', '0.000'], ['4', '8', '1', '1.000']]
    assert max(map(len, out.splitlines())) <= 120
    code, out, _ = call(capsys, str(tmp_path), '--sort=reward', '--limit=1')
    assert '1.000' in out.splitlines()[1]
    assert '7 more: --limit=0' in out
    assert 'reward 1.000' in call(capsys, str(tmp_path), '--draw=6', '--sample=1')[1]
    assert 'answer 1, reward 1.000' in call(capsys, str(tmp_path), '--diff')[1]
    assert 'version 0, age 2' in call(capsys, str(tmp_path), '--draw=6', '--sample=1', '--diff')[1]
    groups = json.loads(call(capsys, str(tmp_path), '--step=2', '--json')[1])
    assert [(one['update'], one['draw']) for one in groups] == [(2, 4)]


def test_answers_of_an_evaluation(tmp_path: pathlib.Path, capsys):
    answers = [
        {
            'sample': name,
            'reward': reward,
            'label': 'ok',
            'final': '4',
            'finish_reason': 'stop',
            'text': text,
            'tokens': [7],
        }
        for name, reward, text in (('greedy', 1.0, 'four'), (1, 0.0, 'five'))
    ]
    line = {'draw': 0, 'problem': {'answer': '4'}, 'prompt': '2 + 2', 'prompt_tokens': [5], 'answers': answers}
    (tmp_path / 'answers.jsonl').write_text(json.dumps(line) + '\n{"draw": 1')
    code, out, _ = call(capsys, str(tmp_path))
    assert code == 0
    assert '1 groups of an evaluation, 2 answers' in out
    assert 'four' in call(capsys, str(tmp_path), '--draw=0', '--sample=greedy')[1]
    assert 'answer greedy' in call(capsys, str(tmp_path), '--diff')[1]
    (tmp_path / 'answers.jsonl').write_text(json.dumps({**line, 'answers': [{}]}) + '\n')
    code, _, err = call(capsys, str(tmp_path))
    assert code == 2
    assert "answers.jsonl: line 1 has no 'text'" in err


@pytest.mark.parametrize(
    ('arguments', 'said'),
    [
        (['none'], 'there is no directory'),
        (['.'], 'holds no run and no evaluation'),
        (['run'], 'keeps no answers'),
        (['kept', '--step=9'], '--step=9: no answers of it are kept; of updates 1 to 2 some are'),
        (['kept', '--draw=1'], '--draw=1 is not kept'),
        (['kept', '--sample=1'], '--sample=1 needs --draw=N'),
        (['kept', '--draw=2', '--sample=7'], '--sample=7: draw 2 has the answers 0, 1'),
    ],
)
def test_errors_are_one_sentence(tmp_path: pathlib.Path, capsys, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'config.json').write_text('{}')
    write(tmp_path / 'kept', range(1, 3))
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, '')
    assert said in err
    assert err.count('\n') == 1


def test_its_help_names_the_orders_and_needs_no_jax():
    assert main_rollouts.COMMAND.flags().parse_args(['x']).sort in ORDERS
    for order in ORDERS:
        main_rollouts.COMMAND.flags().parse_args(['x', f'--sort={order}'])
    code = 'import sys; from areal_jax import main_rollouts; main_rollouts.main(["x"]); assert "jax" not in sys.modules'
    assert subprocess.run([sys.executable, '-c', code], check=False, capture_output=True).returncode == 0
