"""A run on a Ray cluster of this machine, for test_ray.sh: python -m tests.launch.ray_cluster --workdir=DIR [--stub].

A head and three nodes with the labels of TPU nodes: a slice of two hosts for the learner, one host for an engine; the
head is the host of the other engine, of the controller and of the exporter. While the run goes on the node of one
engine is removed, then one of the learner's, which comes back later. The run must end with its report. --stub: with
roles that compute nothing.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import ray
from ray.cluster_utils import Cluster

from tests.launch.test_local import ROOT, is_alive

LONG_S = 400.0
STEPS, EXPORT_EVERY = 120, 40
HEALTH = {  # how soon Ray notices that a node is gone
    'health_check_initial_delay_ms': 1000,
    'health_check_period_ms': 1000,
    'health_check_failure_threshold': 3,
}
NODE = {'include_dashboard': False, 'object_store_memory': 80 << 20}


class CheckError(Exception):
    """What did not hold."""


def describe_host(slice_name, worker, version, pod_type, topology, chips):
    """Resources and labels of a node, as Ray finds them on a host of a slice."""
    resources = {'TPU': chips, slice_name: 1}
    if worker == 0:
        resources[f'TPU-{pod_type}-head'] = 1
    labels = {
        'ray.io/tpu-slice-name': slice_name,
        'ray.io/tpu-worker-id': str(worker),
        'ray.io/tpu-pod-type': pod_type,
        'ray.io/tpu-topology': topology,
        'ray.io/accelerator-type': f'TPU-{version.upper()}',
    }
    environment = {
        'TPU_NAME': slice_name,
        'TPU_WORKER_ID': str(worker),
        'TPU_ACCELERATOR_TYPE': pod_type,
        'TPU_TOPOLOGY': topology,
    }
    return {'resources': resources, 'labels': labels, 'env_vars': environment, **NODE}


def learner_host(worker):
    return {'num_cpus': 1, **describe_host('slice-a', worker, 'v4', 'v4-16', '2x2x2', 4)}


def engine_host(name, cpus):
    return {'num_cpus': cpus, **describe_host(name, 0, 'v6e', 'v6e-1', '1x1', 1)}


@dataclasses.dataclass
class Nodes:
    cluster: Cluster
    learner: list
    engine: object


def start_cluster():
    """(nodes, retries): Ray gives a node 30 s to start, which a loaded machine may exceed; one retry."""
    for retries in (0, 1):
        cluster = Cluster(initialize_head=True, head_node_args={**engine_host('slice-h', 3), '_system_config': HEALTH})
        try:
            learner = [cluster.add_node(**learner_host(worker)) for worker in range(2)]
            return Nodes(cluster, learner, cluster.add_node(**engine_host('slice-e', 1))), retries
        except Exception as error:
            cluster.shutdown()
            print(f'the cluster did not start: {error}', flush=True)
            if retries:
                raise
    raise AssertionError


class Run:
    """launch.ray in a process of its own."""

    def __init__(self, address, workdir, stub):
        self.workdir, self.is_stub = workdir, stub
        module = 'tests.launch.stand_in_ray' if stub else 'launch.ray'
        learner = '--config.cluster.learner=hosts=2 x fsdp=8'
        flags = [
            *(f'--address={address}', '--config=configs/tiny_cpu.py', f'--workdir={workdir}', '--local_nodes'),
            *('--accelerator=v4', '--topology=2x2x2', '--engine_accelerator=v6e', '--engine_topology=1x1'),
            *('--host=127.0.0.1', learner, '--config.cluster.engines=2 x tensor=1', '--config.rollout.server=own'),
            *('--config.publication.channel=files', '--config.learner.rows_per_microbatch=8'),
            *(f'--config.run.steps={STEPS}', f'--config.run.export_every={EXPORT_EVERY}'),
            *('--config.checkpoint.every=5', f'--config.checkpoint.keep={STEPS}'),
            *('--environment=JAX_PLATFORMS=cpu', '--wait_s=120'),
            '--environment=XLA_FLAGS=--xla_force_host_platform_device_count=4',
            *(f'--python={os.environ.get("AREAL_JAX_PYTHON", sys.executable)}', '--environment=STAND_IN_STEPS=300'),
        ]
        self.process = subprocess.Popen([sys.executable, '-m', module, *flags], cwd=ROOT)

    def count_steps(self):
        path = self.workdir / ('step' if self.is_stub else 'metrics.jsonl')
        if not path.exists():
            return 0
        return int(path.read_text() or 0) if self.is_stub else path.read_text().count('\n')

    def await_steps(self, number):
        self.wait(lambda: self.count_steps() >= number, f'update {number}')
        say(f'{self.count_steps()} updates')

    def wait(self, holds, what, seconds=LONG_S):
        end_s = time.monotonic() + seconds
        while not holds():
            if self.process.poll() is not None:
                raise CheckError(f'launch.ray ended with code {self.process.returncode} before {what}')
            if time.monotonic() > end_s:
                raise CheckError(f'waited in vain for {what}')
            time.sleep(0.3)

    def count_logs(self, name):
        return len(list((self.workdir / 'ray').glob(f'{name}.*.log')))


def check(workdir, stub):
    nodes, retries = start_cluster()
    say(f'the cluster runs, after {retries} retries')
    run = None
    try:
        run = Run(nodes.cluster.address, workdir, stub)
        run.await_steps(20 if stub else 8)
        nodes.cluster.remove_node(nodes.engine, allow_graceful=False)
        say('the node of an engine is removed')
        run.await_steps(run.count_steps() + (50 if stub else 5))
        if [run.count_logs(f'learner-{k}') for k in range(2)] != [1, 1] or run.count_logs('controller-0') != 1:
            raise CheckError('a role that was not on the lost node was started again')
        nodes.cluster.remove_node(nodes.learner[1], allow_graceful=False)
        say('a node of the learner is removed')
        time.sleep(5)
        nodes.cluster.add_node(**learner_host(1))
        say('it is back')
        run.wait(lambda: run.count_logs('learner-1') >= 2, 'the learner on the new node')
        if (code := run.process.wait(LONG_S)) != 0:
            raise CheckError(f'launch.ray ended with code {code}')
        report = json.loads((workdir / 'report.json').read_text())
        say(f'the run ended with its report after {report["steps"]} updates')
        require_ended(workdir, stub)
    finally:
        if run is not None:
            run.process.kill()
            run.process.wait()
        ray.shutdown()
        nodes.cluster.shutdown()


def require_ended(workdir, stub):
    """No process of a role is left; of a real run, the event log keeps its rules and every export is there."""
    if stub:
        lines = [line.split() for line in (workdir / 'events').read_text().splitlines()]
        left = [words[3] for words in lines if words[2] == 'start' and is_alive(int(words[3]))]
        if left:
            raise CheckError(f'processes of roles are left: {left}')
        return
    command = [sys.executable, '-m', 'areal_jax.main_check_log', str(workdir / 'events.jsonl')]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise CheckError('the event log breaks a rule')
    exports = {int(path.parent.name) for path in (workdir / 'exports').glob('*/model.safetensors')}
    if exports != set(range(EXPORT_EVERY, STEPS, EXPORT_EVERY)):
        raise CheckError(f'the exporter wrote versions {sorted(exports)}')


def say(sentence):
    print(f'{time.strftime("%T")} {sentence}', flush=True)


def main():
    parser = argparse.ArgumentParser(prog='tests.launch.ray_cluster')
    parser.add_argument('--workdir', required=True, type=pathlib.Path)
    parser.add_argument('--stub', action='store_true')
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the cluster ends with this process
    try:
        check(options.workdir, options.stub)
    except CheckError as error:
        print(f'FAILED: {error}', file=sys.stderr)
        return 1
    say('every check held')
    return 0


if __name__ == '__main__':
    sys.exit(main())
