"""The asynchronous loop with a learner over two processes of four CPU devices each."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from areal_jax.app.processes import join_processes
from areal_jax.config import ConfigError, default_config


def _start(workdir, index, port, *more):
    overrides = {
        'distributed.processes': 2, 'distributed.coordinator': f'127.0.0.1:{port}', 'mesh.fsdp': 8, 'run.steps': 3,
        'learner.rows_per_microbatch': 8, 'learner.layers': 'stacked', 'checkpoint.every': 2, 'telemetry.plots': False,
        'run.clock': 'virtual',
    }  # fmt: skip
    command = [sys.executable, '-m', 'areal_jax.main_train', '--config=configs/tiny_cpu.py', f'--workdir={workdir}']
    command += [f'--config.{field}={value}' for field, value in overrides.items()]
    environment = os.environ | {'XLA_FLAGS': '--xla_force_host_platform_device_count=4', 'JAX_PLATFORMS': 'cpu'}
    return subprocess.Popen(
        [*command, f'--process_id={index}', *more], env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def _run(workdir, *more):
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    processes = [_start(workdir, index, port, *more) for index in range(2)]
    outputs = [p.communicate(timeout=400) for p in processes]
    return [p.returncode for p in processes], outputs


@pytest.mark.slow
def test_two_processes_train_and_resume(tmp_path):
    codes, outputs = _run(tmp_path)
    assert codes == [0, 0], outputs
    metrics = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    assert len(metrics) == 3
    assert all(m['mismatch/max_abs'] < 1e-4 for m in metrics if m.get('mismatch/n'))
    assert metrics[-1]['update/optimizer_steps'] == 1
    assert (tmp_path / 'report.md').exists()
    # the checkpoint of update 2 goes on to the same third update
    codes, outputs = _run(tmp_path, '--resume')
    assert codes == [0, 0], outputs
    again = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    assert [m['loss/value'] for m in again] == [m['loss/value'] for m in metrics]


def test_a_process_without_a_number_is_told():
    config = default_config()
    config.distributed.processes, config.distributed.coordinator = 2, '127.0.0.1:1'
    with pytest.raises(ConfigError, match=r'needs --process_id, from 0 to 1'):
        join_processes(config, None)


def test_one_process_joins_nobody():
    assert join_processes(default_config(), None) is False
