"""launch.jobset: the YAML, its schema, and its commands."""

import copy
import json
import re
import sys
import time

import jsonschema
import pytest
import yaml

from areal_jax.errors import UserError
from launch import cluster_run, jobset
from launch.programs import Program
from tests.launch.golden_files import require_golden
from tests.launch.test_local import ROOT

THIRD_PARTY = ROOT / 'third_party' / 'jobset'
CRD = THIRD_PARTY / 'jobset.x-k8s.io_jobsets.yaml'
COMMON = [
    *('launch.jobset', '--dry_run', '--config=configs/tiny_cpu.py', '--workdir=/mnt/runs/tiny', '--claim=runs'),
    *('--image=registry/areal_jax', '--config.rollout.server=own', '--config.publication.channel=files'),
]
TPU = [
    *('--accelerator=v6e', '--topology=4x4', '--engine_topology=2x2', '--config.learner.rows_per_microbatch=16'),
    *('--config.cluster.learner=hosts=4 x fsdp=16', '--config.cluster.engines=3 x tensor=4'),
]
GPU = [
    *('--accelerator=gpu', '--node_selector=cloud.google.com/gke-accelerator=NAME', '--engine_image=registry/vllm'),
    *('--engine_node_selector=cloud.google.com/gke-accelerator=OTHER', '--config.rollout.server=vllm'),
    *('--config.cluster.learner=hosts=2 x fsdp=16', '--config.cluster.engines=4 x tensor=1'),
    '--config.learner.rows_per_microbatch=16',
]
CPU = [
    *('--accelerator=cpu', '--config.cluster.learner=hosts=2 x fsdp=2', '--config.cluster.engines=2 x tensor=1'),
    *('--config.learner.rows_per_microbatch=2', '--config.checkpoint.every=2', '--config.run.export_every=4'),
]


def render(flags, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert jobset.main([*COMMON, *flags]) == 0
    return capsys.readouterr().out


def close(schema):
    """The schema of a CRD as a test needs it: Kubernetes drops unknown fields silently."""
    if isinstance(schema, list):
        return [close(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: close(value) for key, value in schema.items()}
    if 'properties' in schema and isinstance(schema['properties'], dict):
        closed.setdefault('additionalProperties', False)
    if schema.get('x-kubernetes-int-or-string'):
        closed['type'] = ['integer', 'string']
    return closed


def schemas():
    found = [json.loads((THIRD_PARTY / 'schema.json').read_text())]
    if CRD.exists():
        versions = yaml.safe_load(CRD.read_text())['spec']['versions']
        found += [close(v['schema']['openAPIV3Schema']) for v in versions if v['name'] == 'v1alpha2']
    return [jsonschema.Draft202012Validator(schema) for schema in found]


def faults(document):
    return ['/'.join(map(str, error.path)) for schema in schemas() for error in schema.iter_errors(document)]


def containers(document):
    """(replicated job, its only container)."""
    for job in document['spec']['replicatedJobs']:
        [container] = job['template']['spec']['template']['spec']['containers']
        yield job, container


@pytest.mark.parametrize(('name', 'flags'), [('tpu', TPU), ('gpu', GPU), ('cpu', CPU)])
def test_the_yaml_is_that_of_the_golden_file_and_fits_the_schema(name, flags, capsys, monkeypatch):
    text = render(flags, capsys, monkeypatch)
    require_golden(f'jobset_{name}.yaml', text)
    assert faults(yaml.safe_load(text)) == []


def test_the_schema_sees_mistakes(capsys, monkeypatch):
    good = yaml.safe_load(render(TPU, capsys, monkeypatch))
    for path, value in (
        (('spec', 'replicatedJobs', 1, 'replicas'), 'x'),
        (('spec', 'replicatedJobs', 1, 'template', 'spec', 'completonMode'), 'Indexed'),
        (('spec', 'failurePolicy', 'rules', 0, 'action'), 'RestartAll'),
        (('spec', 'replicatedJobs', 0, 'template', 'spec', 'template', 'spec', 'containers', 0, 'args'), 'one'),
        (('kind',), 'JobSets'),
    ):
        bad = copy.deepcopy(good)
        node = bad
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value
        assert faults(bad), path


def test_engines_are_left_out_where_servers_run_already(capsys, monkeypatch):
    flags = [word for word in CPU if 'engines' not in word]
    flags += ['--config.rollout.server=external', "--config.rollout.urls=('vllm+http://10.0.0.1:8000',)"]
    document = yaml.safe_load(render(flags, capsys, monkeypatch))
    assert [job['name'] for job in document['spec']['replicatedJobs']] == ['controller', 'learner', 'exporter']


def pods(document):
    """(name of the replicated job, index of the job, index of the pod, container) of every pod."""
    for job, container in containers(document):
        for replica in range(job['replicas']):
            for pod in range(job['template']['spec']['completions']):
                yield job['name'], replica, pod, container


def pod_command(container, replica, pod):
    """(command, environment) as Kubernetes makes them: fields of the pod, and $(NAME) from the environment."""
    fields = {'status.podIP': '127.0.0.1', "metadata.labels['jobset.sigs.k8s.io/job-index']": str(replica)}
    environment = {'JOB_COMPLETION_INDEX': str(pod)}
    for entry in container['env']:
        named = entry.get('valueFrom')
        environment[entry['name']] = fields[named['fieldRef']['fieldPath']] if named else entry['value']
    words = [
        re.sub(r'\$\$|\$\((\w+)\)', lambda m: environment[m[1]] if m[1] else '$', word) for word in container['command']
    ]
    return words, environment


def run_pods(document, folder, seconds):
    """Runs the commands of all pods as launch.local runs its own; returns the controller's code, None if it goes on.

    This interpreter is the image's `python`.
    """
    running = []
    with (folder / 'log').open('ab') as log:
        for name, replica, pod, container in pods(document):
            words, environment = pod_command(container, replica, pod)
            assignments = [f'{key}={value}' for key, value in environment.items()]
            running.append((name, Program(['env', *assignments, sys.executable, *words[1:]], log)))
    end_s = time.monotonic() + seconds
    try:
        while (code := dict(running)['controller'].poll()) is None and time.monotonic() < end_s:
            time.sleep(0.1)
        return code
    finally:
        for _, program in running:
            program.kill()


def test_the_pods_are_a_run_with_stand_ins_for_roles(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cluster_run, 'MODULE', 'tests.launch.stand_in_peer')
    monkeypatch.setenv('STAND_IN_STEPS', '5')
    text = render([*CPU, f'--mount={tmp_path}', f'--workdir={tmp_path}/run'], capsys, monkeypatch)
    assert run_pods(yaml.safe_load(text), tmp_path, 20) == 0, (tmp_path / 'log').read_text()
    started = (tmp_path / 'run' / 'events').read_text().splitlines()
    assert sorted(' '.join(line.split()[:2]) for line in started if line.split()[2] == 'start') == [
        'controller 0', 'engine 0', 'engine 1', 'exporter 0', 'learner 0', 'learner 1',
    ]  # fmt: skip
    assert json.loads((tmp_path / 'run' / 'report.json').read_text()) == {'steps': 5}


@pytest.mark.slow
def test_the_pods_are_a_run(capsys, monkeypatch, tmp_path):
    flags = [f'--mount={tmp_path}', f'--workdir={tmp_path}/run', '--config.run.steps=12']
    document = yaml.safe_load(render([*CPU, *flags], capsys, monkeypatch))
    assert run_pods(document, tmp_path, 400) == 0, (tmp_path / 'log').read_text()
    assert json.loads((tmp_path / 'run' / 'report.json').read_text())['steps'] == 12
    assert {path.name for path in (tmp_path / 'run' / 'exports').iterdir()} <= {'4', '8'}  # the pods end with the run


def test_every_command_names_its_role(capsys, monkeypatch):
    document = yaml.safe_load(render([*CPU, '--config.task.name=a$(b)$$c.py:f'], capsys, monkeypatch))
    said = []
    for name, replica, pod, container in pods(document):
        words, environment = pod_command(container, replica, pod)
        flags = dict(word.removeprefix('--').split('=', 1) for word in words[3:])
        index = flags['index']
        said.append(
            (name, flags['role'], environment[index[4:]] if index.startswith('env:') else index, flags['count'])
        )
        assert words[:3] == ['python', '-m', 'areal_jax.main_role']
        assert (flags['host'], flags['workdir']) == ('127.0.0.1', '/mnt/runs/tiny')
        assert flags['config.task.name'] == 'a$(b)$$c.py:f'
    assert said == [
        ('controller', 'controller', '0', '1'),
        ('learner', 'learner', '0', '2'),
        ('learner', 'learner', '1', '2'),
        ('engine', 'engine', '0', '2'),
        ('engine', 'engine', '1', '2'),
        ('exporter', 'exporter', '0', '1'),
    ]


def test_who_is_made_again(capsys, monkeypatch):
    exports = ['--config.checkpoint.every=2', '--config.run.export_every=4']
    document = yaml.safe_load(render([*TPU, *exports], capsys, monkeypatch))
    final = {}
    for job, container in containers(document):
        [rule] = job['template']['spec']['podFailurePolicy']['rules']
        assert (rule['action'], rule['onExitCodes']['containerName']) == ('FailJob', container['name'])
        final[job['name']] = rule['onExitCodes']['values']
    assert final == {'controller': [1, 2, 3], 'learner': [1, 2], 'engine': [2], 'exporter': [2]}
    assert [rule['action'] for rule in document['spec']['failurePolicy']['rules']] == ['FailJobSet', 'RestartJob']


def test_an_engine_or_exporter_that_is_evicted_is_made_again(capsys, monkeypatch):
    """Kubernetes makes no pod in place of one that it told to stop and that ends with 0."""
    document = yaml.safe_load(render(CPU, capsys, monkeypatch))
    found = {}
    for job, container in containers(document):
        codes = [entry['value'] for entry in container['env'] if entry['name'] == 'AREAL_JAX_STOPPED_CODE']
        found[job['name']] = codes
    assert found == {'controller': [], 'learner': [], 'engine': ['75'], 'exporter': ['75']}


@pytest.mark.parametrize(
    ('flags', 'said'),
    [
        (['--accelerator=v6'], "--accelerator='v6' is not known: use v4, v5p, v5e, v6e, v7x, gpu or cpu"),
        (['--topology=3x3'], "the topology '3x3' is none of v6e; those that are known are 1x1, 2x2, 2x4"),
        (
            ['--topology=4x8'],
            "cluster.learner='hosts=4 x fsdp=16' asks for 4 x 4 devices, and a slice of v6e 4x8 has 8 x 4",
        ),
        (['--engine_topology=2x4'], 'v6e 2x4 exists as one host of 8 chips and as two hosts of 4: say which'),
        (['--engine_topology=1x1'], "an engine of cluster.engines='3 x tensor=4' asks for 1 x 4 devices"),
        (['--workdir=/mnt/runs/../run'], '--workdir=/mnt/run is not below --mount=/mnt/runs'),
        (['--workdir=/home/me/run'], '--workdir=/home/me/run is not below --mount=/mnt/runs'),
        (['--engine_accelerator=gpu'], '--engine_accelerator=gpu needs --engine_node_selector'),
        (['--name=A_b'], "--name='A_b' cannot name a JobSet"),
    ],
)
def test_what_cannot_be_placed_is_refused_in_one_sentence(flags, said, monkeypatch):
    monkeypatch.chdir(ROOT)
    names = {flag.split('=')[0] for flag in flags}
    given = [flag for flag in [*COMMON, *TPU] if flag.split('=')[0] not in names]
    with pytest.raises(UserError, match=re.escape(said)):
        jobset.main([*given, *flags])


def test_a_missing_claim_or_kubectl_is_named(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match='--claim is missing'):
        jobset.main([word for word in [*COMMON, *CPU] if not word.startswith('--claim')])
    monkeypatch.setenv('PATH', str(tmp_path))
    with pytest.raises(UserError, match='there is no kubectl on the PATH'):
        jobset.main([word for word in [*COMMON, *CPU] if word != '--dry_run'])
