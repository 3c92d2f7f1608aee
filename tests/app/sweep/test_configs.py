"""Every sweep of configs/sweeps/ is valid, as its commands would find it."""

import pathlib

import pytest

from areal_jax import main_sweep
from areal_jax.app.command_line import defines
from areal_jax.app.ending import end_command
from tests.app.sweep.toy_sweep import ROOT, NoSignals

FILES = sorted((ROOT / 'configs' / 'sweeps').glob('*.py'))


@pytest.mark.parametrize('file', FILES, ids=lambda file: file.stem)
def test_a_dry_run_prints_a_command_for_every_arm(file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    workdir = tmp_path / 'sweep'
    quick = ['--quick'] if defines(str(file), 'get_study') else []
    argv = ['main_sweep', f'--config={file.relative_to(ROOT)}', f'--workdir={workdir}', '--dry_run', *quick]
    assert end_command(lambda: main_sweep.main(argv, NoSignals()), doing='writing') == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) >= 5, said
    assert not pathlib.Path(workdir).exists()
