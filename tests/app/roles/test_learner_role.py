"""Runs over two processes of four CPU devices each: the asynchronous loop, supervised training against one process of
eight devices, loaded weights, and what becomes of a run when a process is gone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import pytest

from areal_jax.app.roles.learner_role import join_processes
from areal_jax.config import default_config
from areal_jax.config.fields import ConfigError
from areal_jax.formats.hf_directory import load_hf
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.publication.export import export_hf
from areal_jax.publication.manifest import weights_sha256
from tests.tasks import hf_directory

LOOP = {
    'config': 'configs/tiny_cpu.py', 'run.steps': 3, 'checkpoint.every': 2, 'telemetry.plots': False,
    'run.clock': 'virtual',
}  # fmt: skip
SUPERVISED = {
    'config': 'configs/sft_tiny.py', 'run.steps': 5, 'checkpoint.every': 3, 'sft.evaluate_every': 2,
    'optimizer.schedule': 'constant', 'optimizer.warmup_steps': 1, 'learner.groups_per_update': 16,
    'learner.row_tokens': 48, 'learner.row_loss_tokens': 32,
}  # fmt: skip
ALL = {
    'cluster.learner': 'fsdp=8',
    'learner.rows_per_microbatch': 8,
    'learner.layers': 'stacked',
    'telemetry.tensorboard': False,
}
LOST = 'the run ends here, go on from the last checkpoint with --resume'
DEADLINE_S = 60


def _free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def _spawn(command, devices):
    environment = os.environ | {
        'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
        'JAX_PLATFORMS': 'cpu',
    }
    return subprocess.Popen(
        [sys.executable, '-m', *command], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def _start(workdir, fields, *more, processes=2, of_follower=()):
    fields = fields | ALL
    if processes > 1:
        fields['cluster.learner'] = f'hosts={processes} x {fields.get("cluster.learner", "data=1")}'
        fields['distributed.coordinator'] = f'127.0.0.1:{_free_port()}'
        fields['distributed.command_deadline_s'] = DEADLINE_S
    command = ['areal_jax.main_train', f'--config={fields.pop("config")}', f'--workdir={workdir}']
    command += [*(f'--config.{field}={value}' for field, value in fields.items()), *more]
    own = [(), of_follower][:processes]
    return [_spawn([*command, f'--process_id={i}', *own[i]], 8 // processes) for i in range(processes)]


def _end(started, timeout=400):
    """(exit codes, what was printed, what was said to be wrong) of each process."""
    try:
        outputs = [p.communicate(timeout=timeout) for p in started]
    finally:
        for p in started:
            p.kill()
    return [p.returncode for p in started], [out for out, _ in outputs], [error for _, error in outputs]


def _complete(workdir, fields, *more, **options):
    codes, outputs, errors = _end(_start(workdir, fields, *more, **options))
    assert not any(codes), (codes, outputs, errors)
    return outputs


def _metrics(workdir):
    return [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]


def _sentences(error):
    assert 'Traceback' not in error, error
    return [line.removeprefix('error: ') for line in error.splitlines() if line.startswith('error: ')]


@pytest.mark.slow
def test_two_processes_train_and_resume(tmp_path):
    _complete(tmp_path, LOOP)
    metrics = _metrics(tmp_path)
    assert len(metrics) == 3
    assert all(m['mismatch/max_abs'] < 1e-4 for m in metrics if m.get('mismatch/n'))
    assert metrics[-1]['update/optimizer_steps'] == 1
    assert (tmp_path / 'report.md').exists()
    sha256 = json.loads((tmp_path / 'facts.json').read_text())['weights_sha256']
    assert weights_sha256(jax.device_get(load_hf(tmp_path / 'export')[1])) == sha256
    # the checkpoint of update 2 goes on to the same third update
    shutil.rmtree(tmp_path / 'checkpoints' / 'step_00000003')
    _complete(tmp_path, LOOP, '--resume')
    assert [m['loss/value'] for m in _metrics(tmp_path)] == [m['loss/value'] for m in metrics]


@pytest.mark.slow
def test_versions_in_files_are_written_by_both_processes(tmp_path):
    fields = LOOP | {'publication.channel': 'files', 'publication.verify': True, 'run.steps': 2, 'checkpoint.every': 1}
    _complete(tmp_path, fields)
    newest = tmp_path / 'publication' / 'v000002'
    assert sorted(path.name for path in newest.glob('*.safetensors')) == [
        f'model-0000{index}-of-00002.safetensors' for index in (1, 2)
    ]
    sha256 = json.loads((tmp_path / 'facts.json').read_text())['weights_sha256']
    exported = jax.device_get(load_hf(tmp_path / 'export')[1])
    assert weights_sha256(exported) == weights_sha256(jax.device_get(load_hf(newest)[1])) == sha256
    before = _metrics(tmp_path)
    shutil.rmtree(tmp_path / 'checkpoints' / 'step_00000002')
    _complete(tmp_path, fields, '--resume')  # versions after the checkpoint are written again
    assert [m['loss/value'] for m in _metrics(tmp_path)] == [m['loss/value'] for m in before]
    assert (tmp_path / 'registry' / 'key').stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_versions_that_both_processes_send_train_as_their_files_do(tmp_path):
    """Bit for bit, whatever carries them; the engine computes every digest again."""
    fields = LOOP | {'publication.verify': True, 'publication.dtype': 'bfloat16', 'checkpoint.every': 1}
    ways = {
        'files': {}, 'stream': {'publication.delta': True, 'publication.listen': 'own'},
        'shm': {'publication.delta': True, 'publication.base_every': 2},
    }  # fmt: skip
    found = {}
    for channel, more in ways.items():
        _complete(workdir := tmp_path / channel, fields | more | {'publication.channel': channel})
        sha256 = json.loads((workdir / 'facts.json').read_text())['weights_sha256']
        found[channel] = sha256, [m['loss/value'] for m in _metrics(workdir)]
        events = map(json.loads, (workdir / 'events.jsonl').read_text().splitlines())
        sent = [event for event in events if event['kind'] == 'publish']
        assert len(sent) == 3
        assert [event.get('record') for event in sent].count('delta') == {'files': 0, 'stream': 3, 'shm': 2}[channel]
    assert found['stream'] == found['shm'] == found['files']


@pytest.fixture(scope='module')
def supervised(tmp_path_factory):
    """The directory of a supervised run over two processes."""
    _complete(workdir := tmp_path_factory.mktemp('two'), SUPERVISED)
    return workdir


@pytest.mark.slow
def test_supervised_losses_are_those_of_one_process(supervised, tmp_path):
    _complete(tmp_path, SUPERVISED, processes=1)
    alone, metrics = _metrics(tmp_path), _metrics(supervised)
    assert [m['step'] for m in metrics] == [1, 2, 3, 4, 5]
    for name in ('loss/nll', 'loss/value', 'update/grad_norm', 'tokens/trained', 'held_out/nll', 'held_out/tokens'):
        expected = [m[name] for m in alone if name in m]
        assert [m[name] for m in metrics if name in m] == pytest.approx(expected, rel=1e-5), name
        assert len(expected) == (3 if name.startswith('held_out') else 5)
    assert metrics[-1]['loss/nll'] < metrics[0]['loss/nll']
    assert (supervised / 'export' / 'model.safetensors').exists()


@pytest.mark.slow
def test_a_supervised_run_resumes_with_the_same_losses(supervised):
    before = _metrics(supervised)
    shutil.rmtree(supervised / 'checkpoints' / 'step_00000005')
    outputs = _complete(supervised, SUPERVISED, '--resume')
    assert 'resumed after update 3' in outputs[0]
    after = _metrics(supervised)
    for name in ('step', 'loss/nll', 'held_out/nll'):
        assert [m.get(name) for m in after] == [m.get(name) for m in before]
    outputs = _complete(supervised, SUPERVISED, '--resume')  # nothing is left to do
    assert '# Supervised training' in outputs[0]
    assert 'compiled' not in outputs[0]


@pytest.mark.slow
def test_one_process_goes_on_from_the_checkpoint_of_two(supervised, tmp_path):
    shutil.copytree(supervised, tmp_path / 'one')
    shutil.rmtree(tmp_path / 'one' / 'checkpoints' / 'step_00000005')
    before = _metrics(supervised)
    fields = SUPERVISED | {'cluster.learner': 'data=2'}
    changed = ('--config.cluster.learner=data=2,fsdp=2', '--config.learner.layers=list', '--resume')
    outputs = _complete(tmp_path / 'one', fields, *changed, processes=1)
    assert 'resumed after update 3' in outputs[0]
    after = _metrics(tmp_path / 'one')
    assert after[:3] == before[:3]
    assert [m['loss/nll'] for m in after] == pytest.approx([m['loss/nll'] for m in before], rel=1e-5)


@pytest.mark.slow
def test_experts_over_two_processes_are_published_by_both_and_go_on_in_one(tmp_path):
    fields = LOOP | {'config': 'configs/tiny_moe.py', 'publication.channel': 'files', 'publication.verify': True}
    _complete(tmp_path, fields, '--config.cluster.learner=hosts=2 x fsdp=2,expert=4')
    before = _metrics(tmp_path)
    assert all(m['mismatch/max_abs'] < 1e-5 for m in before if m.get('mismatch/n'))
    sha256 = json.loads((tmp_path / 'facts.json').read_text())['weights_sha256']
    for written in (tmp_path / 'publication' / 'v000003', tmp_path / 'export'):
        assert weights_sha256(jax.device_get(load_hf(written)[1])) == sha256
    shutil.rmtree(tmp_path / 'checkpoints' / 'step_00000003')
    _complete(tmp_path, fields, '--config.cluster.learner=data=1', '--resume', processes=1)
    after = _metrics(tmp_path)
    assert [m['loss/entropy'] for m in after] == pytest.approx([m['loss/entropy'] for m in before], rel=1e-5)
    assert json.loads((tmp_path / 'config.json').read_text())['cluster']['learner'] == 'data=1'


@pytest.mark.slow
def test_an_error_of_process_0_alone_is_one_sentence_in_both(supervised):
    codes, _, errors = _end(_start(supervised, SUPERVISED))
    assert codes == [2, 75]
    (own,), (other,) = map(_sentences, errors)
    assert 'holds a run already: go on with --resume' in own
    assert other == 'process 0 ended before the run began; its own output says why'


@pytest.mark.slow
def test_an_error_of_a_follower_alone_is_one_sentence_in_both(tmp_path):
    absent = ('--config.model.source=hf', f'--config.model.path={tmp_path / "absent"}')
    codes, _, errors = _end(_start(tmp_path / 'run', SUPERVISED, of_follower=absent))
    assert codes == [75, 2]
    (other,), (own,) = map(_sentences, errors)
    assert 'config.json cannot be read' in own
    assert other == 'process 1 ended before the run began; its own output says why'


def _wait_for_updates(workdir, started, count):
    end = time.monotonic() + 200
    while not (workdir / 'metrics.jsonl').exists() or len(_metrics(workdir)) < count:
        assert time.monotonic() < end
        assert all(p.poll() is None for p in started), [p.communicate() for p in started if p.poll() is not None]
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_follower_ends_process_0_within_the_deadline(tmp_path):
    started = _start(tmp_path, SUPERVISED | {'run.steps': 5000})
    _wait_for_updates(tmp_path, started, 4)
    started[1].kill()
    began = time.monotonic()
    codes, _, errors = _end(started, DEADLINE_S + 30)
    assert time.monotonic() - began < DEADLINE_S
    assert codes == [75, -signal.SIGKILL]
    assert _sentences(errors[0]) == [f'follower 1 is gone; {LOST}']
    assert (tmp_path / 'checkpoints' / 'step_00000003').is_dir()


# as Ctrl-C in a terminal and the end of a SLURM job do: the followers must live until process 0 has saved
@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_saves_the_run(tmp_path, number):
    started = _start(tmp_path, SUPERVISED | {'run.steps': 5000})
    _wait_for_updates(tmp_path, started, 1)
    for process in reversed(started):
        process.send_signal(number)
    codes, outputs, errors = _end(started, DEADLINE_S + 30)
    assert codes == [75, 0], errors
    assert 'stopped; the same command with --resume goes on from' in outputs[0]
    assert (tmp_path / 'checkpoints' / f'step_{len(_metrics(tmp_path)):08d}').is_dir()


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
    """A model of Hugging Face with its tokenizer."""
    shape = ModelConfig(
        vocab_size=512, d_model=64, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=96, rope_theta=1e4,
        family='qwen3', qk_norm=True, context_tokens=64,
    )  # fmt: skip
    path = tmp_path_factory.mktemp('hf') / 'model'
    export_hf(path, Decoder(shape).init(3), shape, file_bytes=200_000, dtype='float32')
    hf_directory.write(path)
    return path


@pytest.mark.slow
def test_each_process_loads_its_shards_of_a_hugging_face_directory(directory, tmp_path):
    port, files = str(_free_port()), [tmp_path / f'{index}.json' for index in range(2)]
    module = 'tests.app.load_in_two'  # compares every value
    started = [_spawn([module, str(i), port, str(directory), str(files[i])], 4) for i in range(2)]
    codes, _, errors = _end(started)
    assert codes == [0, 0], errors
    for report in (json.loads(file.read_text()) for file in files):
        assert report['whole'] / 2 <= report['held'] < 0.51 * report['whole']  # norms are in both
        read = report['read']
        # fsdp=4, of which a process has two, cuts the rows of these two in the file, and the columns of the others
        halves = {name for name, share in read.items() if share == 0.5}
        assert halves == {name for name in read if name.endswith(('o_proj.weight', 'down_proj.weight'))} != set()
        assert {share for name, share in read.items() if name not in halves} == {1.0}


@pytest.mark.slow
def test_training_of_loaded_weights_is_that_of_one_process(directory, tmp_path):
    fields = SUPERVISED | {
        'run.steps': 2, 'model.source': 'hf', 'model.path': directory, 'sft.evaluate_every': 0, 'checkpoint.every': 0,
        'learner.row_tokens': 64,
    }  # fmt: skip
    _complete(tmp_path / 'two', fields)
    _complete(tmp_path / 'one', fields, processes=1)
    losses = [[m['loss/nll'] for m in _metrics(tmp_path / name)] for name in ('two', 'one')]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert (tmp_path / 'two' / 'export' / 'tokenizer.json').exists()  # process 0 wrote what belongs to the model


def test_a_process_without_a_number_is_told():
    config = default_config()
    config.cluster.learner, config.learner.rows_per_microbatch = 'hosts=2 x data=2', 2
    config.distributed.coordinator = '127.0.0.1:1'
    with pytest.raises(ConfigError, match=r'needs --process_id, from 0 to 1'):
        join_processes(config, None)


def test_one_process_joins_nobody():
    assert join_processes(default_config(), None) is False
