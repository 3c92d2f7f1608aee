"""The start of a run as its user sees it: never silent, and nothing on stderr."""

import io
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from areal_jax.telemetry.progress import StartProgress
from tests.native import drop_compiler_warning

ROOT = pathlib.Path(__file__).parents[2]


def wait_until(stream, text):
    end = time.monotonic() + 60
    while text not in stream.getvalue():
        assert time.monotonic() < end, stream.getvalue()
        time.sleep(0.01)


def test_a_long_part_is_announced_and_repeated_with_what_is_done():
    stream = io.StringIO()
    start = StartProgress(True, stream, every_s=0.02)
    start.begin('loading model.gguf')
    assert stream.getvalue().startswith('loading model.gguf\n')
    wait_until(stream, 'loading model.gguf (0 s)\n')
    start.begin('compiling what trains:')
    start.count_programs(2, 11)
    wait_until(stream, 'compiling what trains: program 3 of 11 (0 s)\n')
    start.begin('compiling what trains and generates:')
    start.count_programs(1, 3, of='learner')
    start.count_programs(4, 7, of='engines')
    wait_until(stream, 'compiling what trains and generates: program 6 of 10 (0 s)\n')
    start.begin('evaluating 64 problems')
    start.count_answers(320, 320)
    wait_until(stream, 'evaluating 64 problems: 320 of 320 answers, 0s left (0 s)\n')
    start.end()
    said = stream.getvalue()
    time.sleep(0.1)
    assert stream.getvalue() == said
    start.begin('evaluating again')
    wait_until(stream, 'evaluating again (0 s)\n')
    start.end()
    start.end()


def test_without_progress_nothing_is_printed():
    stream = io.StringIO()
    start = StartProgress(False, stream, every_s=0.01)
    start.begin('loading')
    start.count_programs(0, 3)
    time.sleep(0.05)
    start.end()
    assert stream.getvalue() == ''


@pytest.mark.parametrize('home', ['of the user', pytest.param('new', marks=pytest.mark.slow)])
def test_a_clean_run_and_its_resumption_leave_stderr_empty(tmp_path, home):
    environment = {k: v for k, v in os.environ.items() if k not in ('JAX_PLATFORMS', 'MPLCONFIGDIR')}
    flags = [flag for flag in os.environ.get('XLA_FLAGS', '').split() if 'device_count' not in flag]
    environment['XLA_FLAGS'] = ' '.join(flags)  # one device, compiled as quickly as the tests
    if home == 'new':
        environment['HOME'] = str(tmp_path / 'home')  # no caches of fonts or kernels: they are made, which takes longer
    command = [sys.executable, '-m', 'areal_jax.main_train', '--config=configs/tiny_cpu.py']
    command += [f'--workdir={tmp_path / "run"}', '--config.run.steps=3', '--config.checkpoint.every=1']
    command += ['--config.evaluation.problems=2', '--config.publication.channel=files']
    compiling = 'compiling what generates:', 'compiling what trains and generates:'  # the first evaluates beside it
    for more, part in zip(((), ('--resume', '--config.run.steps=4')), compiling, strict=True):
        done = subprocess.run([*command, *more], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
        assert drop_compiler_warning(done.stderr) == ''
        assert done.returncode == 0
        lines = done.stdout.splitlines()
        assert lines[:2] == ['starting', 'drawing weights']
        assert {'building the learner', part} <= set(lines)
    assert json.loads((tmp_path / 'run' / 'report.json').read_text())['steps'] == 4


def test_the_libraries_are_silenced_before_jax_is_loaded():
    program = (
        'import sys\nfrom areal_jax.app.process.setup import silence_libraries\nsilence_libraries()\n'
        'import os, logging\nprint("jax" in sys.modules, os.environ["TF_CPP_MIN_LOG_LEVEL"])\n'
        'logging.getLogger("matplotlib.font_manager").warning("building the font cache")\n'
        'from absl import logging as absl_logging\nabsl_logging.warning("sharding info not provided")\n'
        'absl_logging.error("what orbax raises too")'
    )
    environment = {k: v for k, v in os.environ.items() if k != 'TF_CPP_MIN_LOG_LEVEL'}
    done = subprocess.run(
        [sys.executable, '-c', program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ('False 2\n', '')
