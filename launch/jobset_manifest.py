"""The JobSet of a run as a dictionary and as YAML, for jobset.x-k8s.io/v1alpha2.

Who restarts whom: a pod that ends with a code other than 0 fails its Job. After the codes of _FINAL the JobSet ends;
after any other the Job alone is made again: the controller, one engine, or all learner processes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from areal_jax.app.process.ending import STOPPED_CODE
from areal_jax.errors import ExitCode, UserError
from areal_jax.installation import describe_install

from .cluster_run import ClusterRun

Node: TypeAlias = Mapping[str, object]  # of the YAML

_LABEL = "metadata.labels['jobset.sigs.k8s.io/job-index']"
_JOB_INDEX, _POD_INDEX = 'AREAL_JAX_JOB_INDEX', 'JOB_COMPLETION_INDEX'  # the second one is set by Kubernetes
_POD_IP = 'AREAL_JAX_POD_IP'
_ONE_SLICE = {'alpha.jobset.sigs.k8s.io/exclusive-topology': 'cloud.google.com/gke-nodepool'}
_FINAL = {  # codes after which a start would end in the same way
    'controller': (ExitCode.BUG, ExitCode.USER_ERROR, ExitCode.NOTHING_TRAINED),
    'learner': (ExitCode.BUG, ExitCode.USER_ERROR),
    'engine': (ExitCode.USER_ERROR,),
    'exporter': (ExitCode.USER_ERROR,),
}


# Kubernetes evicts pods by a signal, and makes none in place of one that then ends with 0
_STOPPED = {role: {STOPPED_CODE: str(int(ExitCode.STOPPED))} for role in ('engine', 'exporter')}


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What the pods of a role run on."""

    limits: Mapping[str, int]  # resource -> number a pod
    node_selector: Mapping[str, str]
    environment: Mapping[str, str]
    is_slice: bool = False  # its pods are the hosts of one slice, whose node pool they do not share
    has_shared_memory: bool = (
        False  # /dev/shm without Kubernetes' limit of 64 MiB: processes of one pod exchange tensors
    )


@dataclasses.dataclass(frozen=True)
class Image:
    """What runs in the pods, and which volume they share."""

    name: str
    engine_name: str
    claim: str  # PersistentVolumeClaim
    mount: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """All that a JobSet has besides the run itself."""

    name: str
    image: Image
    learner: Hardware
    engine: Hardware | None  # None: the run starts no engines
    restarts: int
    grace_s: int
    controller_requests: Mapping[str, str]


def build_jobset(run: ClusterRun, manifest: Manifest) -> Node:
    """The JobSet: one replicated job for each role; the run ends with its controller."""
    jobs = [
        _replicated_job('controller', 1, _job(run, manifest, 'controller')),
        _replicated_job(
            'learner', 1, _job(run, manifest, 'learner', pods=run.learner.count), manifest.learner.is_slice
        ),
    ]
    rules = [
        # an error of the configuration: no restart can help
        {'name': 'final', 'action': 'FailJobSet', 'onJobFailureReasons': ['PodFailurePolicy']},
        {'name': 'again', 'action': 'RestartJob'},
    ]
    if manifest.engine is not None:
        jobs.append(_replicated_job('engine', run.engine.count, _job(run, manifest, 'engine')))
    if run.exporter.count:
        jobs.append(_replicated_job('exporter', 1, _job(run, manifest, 'exporter')))
    return {
        'apiVersion': 'jobset.x-k8s.io/v1alpha2',
        'kind': 'JobSet',
        'metadata': {'name': manifest.name},
        'spec': {
            'network': {'enableDNSHostnames': True, 'publishNotReadyAddresses': True},
            'successPolicy': {'operator': 'All', 'targetReplicatedJobs': ['controller']},
            'failurePolicy': {'maxRestarts': manifest.restarts, 'rules': rules},
            'replicatedJobs': jobs,
        },
    }


def render_yaml(node: Node) -> str:
    """Raises UserError where PyYAML is not installed."""
    if importlib.util.find_spec('yaml') is None:
        raise UserError(f'launch.jobset needs the package PyYAML, which is not installed: {describe_install("jobset")}')
    import yaml

    text: str = yaml.safe_dump(node, sort_keys=False, width=1000)
    return text


def _replicated_job(name: str, replicas: int, job: Node, is_slice: bool = False) -> Node:
    metadata: Node = {'metadata': {'annotations': _ONE_SLICE}} if is_slice else {}
    return {'name': name, 'replicas': replicas, 'template': {**metadata, 'spec': job}}


def _job(run: ClusterRun, manifest: Manifest, role: str, pods: int = 1) -> Node:
    codes = [int(code) for code in _FINAL[role]]
    on_codes = {'containerName': role, 'operator': 'In', 'values': codes}
    return {
        'backoffLimit': 0,
        'completionMode': 'Indexed',
        'completions': pods,
        'parallelism': pods,
        'podFailurePolicy': {'rules': [{'action': 'FailJob', 'onExitCodes': on_codes}]},
        'template': {'spec': _pod(run, manifest, role)},
    }


def _pod(run: ClusterRun, manifest: Manifest, role: str) -> Node:
    image, hardware = manifest.image, {'learner': manifest.learner, 'engine': manifest.engine}.get(role)
    mounts, volumes = (
        [{'name': 'runs', 'mountPath': image.mount}],
        [{'name': 'runs', 'persistentVolumeClaim': {'claimName': image.claim}}],
    )
    pod: dict[str, object] = {'restartPolicy': 'Never', 'terminationGracePeriodSeconds': manifest.grace_s}
    if hardware is None:
        resources: Node = {'requests': dict(manifest.controller_requests)}
    else:
        resources = {'limits': dict(hardware.limits)} if hardware.limits else {}
        if hardware.node_selector:
            pod['nodeSelector'] = dict(hardware.node_selector)
        if hardware.has_shared_memory:
            mounts.append({'name': 'memory', 'mountPath': '/dev/shm'})
            volumes.append({'name': 'memory', 'emptyDir': {'medium': 'Memory'}})
    container: dict[str, object] = {
        'name': role,
        'image': image.engine_name if role == 'engine' else image.name,
        'command': _command(run, role),
        'env': _environment({**(hardware.environment if hardware else {}), **_STOPPED.get(role, {})}),
    }
    if resources:
        container['resources'] = resources
    return {**pod, 'containers': [{**container, 'volumeMounts': mounts}], 'volumes': volumes}


def _command(run: ClusterRun, role: str) -> list[str]:
    """Kubernetes replaces $(NAME), from the environment of the container, and $$ by $."""
    index = {'learner': f'env:{_POD_INDEX}', 'engine': f'env:{_JOB_INDEX}'}.get(role, '0')
    count = {'learner': run.learner.count, 'engine': run.engine.count}.get(role, 1)
    words = [word.replace('$', '$$') for word in run.command]
    return [*words, f'--role={role}', f'--index={index}', f'--count={count}', f'--host=$({_POD_IP})']


def _environment(values: Mapping[str, str]) -> Sequence[Node]:
    return [
        {'name': _POD_IP, 'valueFrom': {'fieldRef': {'fieldPath': 'status.podIP'}}},
        {'name': _JOB_INDEX, 'valueFrom': {'fieldRef': {'fieldPath': _LABEL}}},
        *({'name': name, 'value': value} for name, value in values.items()),
    ]
