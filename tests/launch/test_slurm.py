"""launch.slurm: the sbatch files, what they do, and what is refused. launch/test_slurm.sh has a real SLURM run them."""

import json
import os
import re
import subprocess
import sys

import pytest

from areal_jax.errors import UserError
from launch import cluster_run, slurm
from tests.launch.golden_files import require_golden
from tests.launch.test_local import ROOT, wait_until

COMMON = ['launch.slurm', '--config=configs/tiny_cpu.py', '--python=python3']
OWN = ['--config.rollout.server=own', '--config.publication.channel=files', '--config.learner.rows_per_microbatch=8']
SMALL = [*OWN, '--config.cluster.learner=hosts=2 x fsdp=4', '--config.cluster.engines=2 x tensor=1']
LARGE = [
    *OWN, '--config.cluster.learner=hosts=2 x fsdp=8', '--config.cluster.engines=5 x tensor=2',
    *('--gpus_per_node=4', '--time=12:00:00', '--account=research', '--setup=module load cuda'),
]  # fmt: skip


def render(flags, capsys, workdir='/shared/runs/a'):
    assert slurm.main([*COMMON, f'--workdir={workdir}', '--dry_run', *flags]) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    ('name', 'flags'),
    [
        ('shared', [*SMALL, '--share_nodes', '--host=127.0.0.1', '--local_nodes']),
        ('plain', LARGE),
        ('heterogeneous', [*LARGE, '--partition=big', '--engine_partition=small', '--engine_gpus_per_node=2']),
        ('exports', [*LARGE, '--config.checkpoint.every=2', '--config.run.export_every=4']),
        ('sweep', ['--sweep', '--config=configs/sweeps/tiny.py', '--jobs=2', '--config.run.steps=9', '--only=eta4_*']),
    ],
)
def test_the_file_is_the_golden_one(name, flags, capsys):
    if name == 'sweep':
        assert slurm.main([COMMON[0], COMMON[2], '--workdir=/shared/runs/a', '--dry_run', *flags]) == 0
        text = capsys.readouterr().out
    else:
        text = render(flags, capsys)
    require_golden(f'slurm_{name}.sbatch', text, ROOT)
    assert subprocess.run(['bash', '-n'], input=text, text=True, check=False).returncode == 0


def test_engines_fill_the_gpus_that_the_learner_leaves(capsys):
    text = render(
        [
            *OWN, '--share_nodes', '--gpus_per_node=8',
            *('--config.cluster.learner=hosts=2 x fsdp=8', '--config.cluster.engines=4 x tensor=2'),
        ],
        capsys,
    )  # fmt: skip
    placed = re.findall(r'engine-(\d) .*engine_nodes\[(\d)\]}" -- env CUDA_VISIBLE_DEVICES=(\S+)', text)
    assert placed == [('0', '0', '4,5'), ('1', '1', '4,5'), ('2', '0', '6,7'), ('3', '1', '6,7')]
    assert 'env CUDA_VISIBLE_DEVICES=0,1,2,3 "${role[@]}" --role=learner' in text


@pytest.mark.parametrize(
    ('flags', 'said'),
    [
        (
            ['--gpus_per_node=2'],
            "cluster.learner='hosts=2 x fsdp=8' asks for 4 devices a process, and a node has 2 GPUs",
        ),
        (
            ['--share_nodes'],
            '5 engines of 2 GPUs do not fit beside the learner, which leaves 0 of --gpus_per_node=4 free on each of 2',
        ),
        (['--share_nodes', '--engine_partition=b'], '--share_nodes puts engines on the nodes of the learner'),
        (['--workdir=/tmp/a'], '--workdir=/tmp/a is in /tmp, which each of the 5 nodes has for itself'),
        (['--workdir=/shared/50%'], "--workdir=/shared/50% has '%' in it"),
        (['--workdir=/shared/run#2'], "--workdir='/shared/run#2' has '#' in it"),
        (['--sweep', '--workdir=gs://bucket/a'], '--workdir=gs://bucket/a is a URL, and a run needs a directory'),
        (['--host=10.0.0.1'], '--host=10.0.0.1 would be the address of the roles of all 5 nodes: leave it out'),
        (['--job_name=my run'], "--job_name='my run' has ' ' in it"),
        (['--account=a\n#SBATCH --exclude=n1'], "--account='a\\n#SBATCH --exclude=n1' has '\\n' in it"),
        (['--qos=a"b'], "--qos='a\"b' has '\"' in it"),
        (['--time=1 2'], "--time='1 2' has ' ' in it"),
        (['--partition=a#b'], "--partition='a#b' has '#' in it"),
        (['--constraint=a b'], "--constraint='a b' has ' ' in it"),
        (['--engine_partition=a b'], "--engine_partition='a b' has ' ' in it"),
        (['--engine_constraint=$a'], "--engine_constraint='$a' has '$' in it"),
        (['--sbatch_option=--mem=0\necho'], "--sbatch_option='--mem=0\\necho' has more than one line"),
        (['--config.cluster.learner=fsdp=8'], "use cluster.learner='hosts=1 x fsdp=8'"),
    ],
)
def test_what_cannot_be_placed_is_refused_in_one_sentence(flags, said, capsys):
    names = {flag.split('=')[0] for flag in flags}
    given = [flag for flag in ['--workdir=/shared/runs/a', *LARGE] if flag.split('=')[0] not in names]
    with pytest.raises(UserError, match=re.escape(said)):
        slurm.main([*COMMON, '--dry_run', *given, *flags])


@pytest.mark.parametrize('name', ['my runs', "a'b", 'a\n#SBATCH --exclude=n1', 'run#2', 'plain'])
@pytest.mark.parametrize('sweep', [False, True])
def test_a_current_directory_that_sbatch_cannot_name_is_entered_by_the_script(
    name, sweep, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.chdir(folder)
    config = 'configs/sweeps/tiny.py' if sweep else 'configs/tiny_cpu.py'
    flags = ['--sweep'] if sweep else LARGE
    assert slurm.main(['slurm', f'--config={ROOT}/{config}', '--workdir=/shared/a', '--dry_run', *flags]) == 0
    head, _, body = capsys.readouterr().out.partition('set -u\n')
    assert (f'#SBATCH --chdir={folder}\n' in head) is (name == 'plain')
    assert ('--chdir' in head) is (name == 'plain')
    assert '--exclude' not in head
    if name != 'plain':
        script = f'{body.partition("|| exit 2")[0]}\npwd'
        assert subprocess.check_output(['bash', '-c', script], text=True, cwd='/') == f'{folder}\n'


def test_the_arms_of_a_sweep_log_to_a_workdir_with_an_ampersand(programs, tmp_path, monkeypatch, capsys):
    folder = tmp_path / 'a&b'
    programs.add('srun', f'printf "%s\\n" "$@" >{tmp_path}/said')
    programs.add('arm', 'echo train "--workdir=x\\&y"')
    flags = ['--sweep', '--config=configs/sweeps/tiny.py', f'--workdir={folder}', f'--python={programs.folder}/arm']
    assert slurm.main(['slurm', *flags, '--dry_run', '--local_nodes']) == 0
    script = capsys.readouterr().out
    ids = {'SLURM_ARRAY_TASK_ID': '1', 'SLURM_ARRAY_JOB_ID': '7'}
    subprocess.run(['bash', '-c', script], env=os.environ | ids, check=True)
    log = next((folder / '.slurm').iterdir()) / '7_1.0.log'
    assert (tmp_path / 'said').read_text().splitlines() == [
        '--cpu-bind=none', f'--output={log}', 'train', '--workdir=x&y',
    ]  # fmt: skip


class Programs:
    """A folder of programs that stand in for those of SLURM."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder / 'bin'
        self.folder.mkdir()
        monkeypatch.setenv('PATH', f'{self.folder}:{os.environ["PATH"]}')

    def add(self, name, text):
        path = self.folder / name
        path.write_text(f'#!/bin/bash\n{text}\n')
        path.chmod(0o755)


@pytest.fixture
def programs(tmp_path, monkeypatch):
    return Programs(tmp_path, monkeypatch)


def test_a_machine_without_sbatch_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv('PATH', str(tmp_path))
    with pytest.raises(UserError, match='there is no sbatch on the PATH'):
        slurm.main([*COMMON, f'--workdir={tmp_path}/run', *SMALL])
    assert not (tmp_path / 'run').exists()


def test_too_few_nodes_are_refused_before_anything_is_written(programs, tmp_path):
    programs.add('sbatch', 'exit 1')
    programs.add('sinfo', 'echo "main* 3"; echo "other 9"')
    with pytest.raises(UserError, match=re.escape("need 4 nodes of the partition 'main', which has 3")):
        slurm.main([*COMMON, '--local_nodes', f'--workdir={tmp_path}/run', *SMALL])
    programs.add('sinfo', 'echo "other 3"')
    with pytest.raises(UserError, match=re.escape("need 4 nodes of the partition 'other', which has 3")):
        slurm.main([*COMMON, '--local_nodes', '--partition=other', f'--workdir={tmp_path}/run', *SMALL])
    assert not (tmp_path / 'run').exists()


def test_a_file_is_submitted_and_a_used_workdir_needs_resume(programs, tmp_path, capsys):
    programs.add('sbatch', 'cp "$2" "$2.submitted"; echo 7')
    programs.add('sinfo', 'echo "main* 4"')
    flags = [*COMMON, '--local_nodes', f'--workdir={tmp_path}/run', *SMALL]
    assert slurm.main(flags) == 0
    assert capsys.readouterr().out.startswith('job 7 of ')
    folder = tmp_path / 'run' / 'slurm'
    assert (folder / 'job.sbatch.submitted').read_text() == (folder / 'job.sbatch').read_text()
    (tmp_path / 'run' / 'config.json').write_text('{}')
    with pytest.raises(UserError, match='holds a run already: go on with --resume'):
        slurm.main(flags)
    assert slurm.main([*flags, '--resume']) == 0
    with pytest.raises(UserError, match='holds no run yet: start without --resume'):
        slurm.main([*flags, f'--workdir={tmp_path}/other', '--resume'])
    programs.add('sbatch', 'echo "invalid partition" >&2; exit 1')
    with pytest.raises(UserError, match=r'sbatch refuses .*: invalid partition'):
        slurm.main([*flags, '--resume'])


def test_what_the_roles_need_is_checked_before_the_job_is_queued(programs, tmp_path, monkeypatch):
    programs.add('sbatch', f'touch {tmp_path}/queued; echo 7')
    programs.add('sinfo', 'echo "main* 9"')
    programs.add('gpu_python', """echo '{"jax-cuda13-plugin": "0.10.2"}'""")
    programs.add('cpu_python', 'echo {}')
    programs.add('sglang_python', """echo '{"sglang": "0.5.0", "torch": "2.14.1"}'""")
    monkeypatch.setenv('AREAL_JAX_SGLANG_PYTHON', str(programs.folder / 'sglang_python'))
    flags = [flag for flag in LARGE if 'server' not in flag] + ['--config.rollout.server=sglang']
    flags = [COMMON[0], COMMON[1], '--local_nodes', f'--workdir={tmp_path}/run', *flags]
    with pytest.raises(
        UserError, match=r"cpu_python has no jax for GPUs .*: \S*/cpu_python -m pip install 'jax\[cuda13\]'"
    ):
        slurm.main([*flags, f'--python={programs.folder}/cpu_python'])
    flags += [f'--python={programs.folder}/gpu_python']
    with pytest.raises(UserError, match=r"^rollout.server='sglang': \S* has 0\.5\.0 of SGLang, and 0\.5\.23 is what"):
        slurm.main(flags)
    assert not (tmp_path / 'queued').exists()
    assert not (tmp_path / 'run').exists()
    programs.add('sglang_python', """echo '{"sglang": "0.5.23", "torch": "2.14.1"}'""")
    assert slurm.main(flags) == 0
    assert (tmp_path / 'queued').exists()


class Job:
    """The batch script of a run in this process's own bash, with programs in SLURM's place.

    srun starts its command once for each task; scancel signals what it started, and the first process alone of a task.
    """

    def __init__(self, programs, tmp_path, monkeypatch, capsys, flags=(), **environment):
        monkeypatch.setattr(cluster_run, 'MODULE', 'tests.launch.stand_in_slurm')
        self.workdir, pids = tmp_path / 'run', tmp_path / 'pids'
        programs.add('scontrol', f'case $1 in requeue) echo requeued >>{tmp_path}/calls ;; '
                     'hostnames) ;; esac; case "$1 $2" in "show hostnames") printf "n1\\nn2\\n" ;; '
                     '"show job") echo JobState=${JOB_STATE:-RUNNING} ;; esac')  # fmt: skip
        programs.add(
            'scancel', f'echo "$@" >>{tmp_path}/signals; kill -${{1#--signal=}} $(cat {pids}) 2>/dev/null; true'
        )
        programs.add('squeue', 'printf "7.0\\n7.12\\n7.batch\\n7.extern\\n"')
        programs.add('srun', f'exec {sys.executable} -m tests.launch.stand_in_srun {pids} "$@"')
        common = [COMMON[0], COMMON[1], f'--python={sys.executable}', '--share_nodes', '--host=127.0.0.1', *SMALL]
        text = self._render([*common, *flags], capsys)
        self.file = tmp_path / 'job.sbatch'
        self.file.write_text(text)
        self.calls, self.signals = tmp_path / 'calls', tmp_path / 'signals'
        self.environment = os.environ | {'SLURM_JOB_ID': '7', 'SLURM_JOB_NODELIST': 'n[1-2]'} | environment

    def _render(self, flags, capsys):
        assert slurm.main([*flags, '--dry_run', '--local_nodes', f'--workdir={self.workdir}']) == 0
        return capsys.readouterr().out.replace('sleep 2', 'sleep 0.2').replace('sleep 1 &', 'sleep 0.1 &')

    def shorten_grace(self):
        text = self.file.read_text()
        assert 'have_ended 105' in text
        self.file.write_text(text.replace('have_ended 105', 'have_ended 1'))

    def start(self):
        self.process = subprocess.Popen(
            ['bash', str(self.file)], cwd=ROOT, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip

    def finish(self):
        output, _ = self.process.communicate(timeout=30)
        return self.process.returncode, output

    def events(self, *words):
        path = self.workdir / 'events'
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(' '.join(words))]


def test_a_job_runs_its_roles_restarts_an_engine_and_ends(programs, tmp_path, monkeypatch, capsys):
    job = Job(programs, tmp_path, monkeypatch, capsys, STAND_IN_STEPS='15')
    job.start()
    wait_until(lambda: len(job.events('engine 1 start')) == 1, 'the engine')
    os.kill(int(job.events('engine 1 start')[0].split()[3]), 9)
    code, output = job.finish()
    assert code == 0, output
    assert json.loads((job.workdir / 'report.json').read_text()) == {'steps': 15}
    assert [len(job.events(*role)) for role in (
        ('controller 0 start',), ('learner 0 start',), ('learner 1 start',), ('engine 0 start',), ('engine 1 start',),
    )] == [1, 1, 1, 1, 2]  # fmt: skip
    assert len(job.events('engine 0 end 0')) == 1  # told by the end of the job
    logs = {path.name for path in (job.workdir / 'slurm' / '7.0').glob('*.log')}
    assert logs == {'controller.0.log', 'learner-0.0.log', 'learner-1.0.log', 'engine-0.0.log', 'engine-1.0.log',
                    'engine-1.1.log'}  # fmt: skip
    assert not job.calls.exists()


@pytest.mark.parametrize(('state', 'requeued'), [('RUNNING', True), ('CANCELLED', False)])
def test_a_job_that_is_told_to_save_is_queued_again_unless_it_was_cancelled(
    state, requeued, programs, tmp_path, monkeypatch, capsys
):
    job = Job(programs, tmp_path, monkeypatch, capsys, STAND_IN_STEPS='1000', JOB_STATE=state)
    job.start()
    saved = job.workdir / 'step'
    wait_until(lambda: saved.exists() and saved.read_text() not in ('', '0'), 'steps')  # with all learners
    job.process.terminate()
    code, output = job.finish()
    assert code == 75, output
    assert len(job.events('controller 0 end 75')) == len(job.events('learner 1 end 75')) == 1
    assert job.calls.exists() is requeued


def test_a_role_with_an_error_of_the_configuration_ends_the_job(programs, tmp_path, monkeypatch, capsys):
    job = Job(programs, tmp_path, monkeypatch, capsys, STAND_IN_FAILS='engine-0')
    job.start()
    code, output = job.finish()
    assert code == 2, output
    assert 'error: port 1 is in use: use another' in output
    assert len(job.events('engine 0 start')) == 1


@pytest.mark.parametrize('code', [1, 2])
def test_the_error_of_one_learner_process_is_that_of_the_run(code, programs, tmp_path, monkeypatch, capsys):
    job = Job(programs, tmp_path, monkeypatch, capsys, STAND_IN_ENDS=f'learner-1={code}')
    job.start()
    ended, output = job.finish()
    assert ended == code, output
    assert f'learner-1 ended for good with code {code}\nerror of learner-1\n' in output
    assert len(job.events('learner 0 start')) == len(job.events('learner 1 start')) == 1


@pytest.mark.parametrize(('codes', 'cause'), [
    ([75, 1], '75 0'),  # one that the others have left may end in any way
    ([1, 75], '1 0'),
    ([143, 134, 3], '3 2'),
    ([1, 137], '1 0'),
    ([137, 1], '137 0'),  # an error after the loss of another one is no bug of its own
    ([137, 1, 2], '2 2'),
    ([143, None, 75, 0], '75 2'),
    ([143, None, 134, 0], ''),
    ([None, None], ''),
    (['', 1], '1 1'),  # a node was lost while it wrote
])  # fmt: skip
def test_the_first_learner_process_that_failed_by_itself_is_the_cause(codes, cause, tmp_path, capsys):
    text = render([*SMALL, '--config.cluster.learner=hosts=4 x fsdp=4'], capsys)
    function = re.search(r'^find_cause\(\) {\n.*?^}\n', text, re.DOTALL | re.MULTILINE)[0]
    for index, code in enumerate(codes):
        if code is not None:  # in the order of their ends
            path = tmp_path / f'learner-{index}.4.code'
            path.write_text(f'{code}\n')
            os.utime(path, (index, 1000 + index))
    found = subprocess.check_output(['bash', '-uc', f'folder={tmp_path}\n{function}find_cause 4'], text=True)
    assert found.strip() == cause


def test_an_exporter_with_an_error_of_the_configuration_ends_the_job(programs, tmp_path, monkeypatch, capsys):
    flags = ['--config.checkpoint.every=2', '--config.run.export_every=4']
    job = Job(programs, tmp_path, monkeypatch, capsys, flags, STAND_IN_ENDS='exporter-0=2')
    job.start()
    code, output = job.finish()
    assert code == 2, output
    assert 'exporter ended for good with code 2\nerror of exporter-0\n' in output


@pytest.mark.parametrize('is_told', [True, False])
def test_a_role_that_does_not_end_is_killed_and_the_job_is_not(is_told, programs, tmp_path, monkeypatch, capsys):
    steps = '1000' if is_told else '10'
    job = Job(programs, tmp_path, monkeypatch, capsys, STAND_IN_DEAF='engine-0', STAND_IN_STEPS=steps)
    job.shorten_grace()
    job.start()
    if is_told:
        saved = job.workdir / 'step'
        wait_until(lambda: saved.exists() and saved.read_text() not in ('', '0'), 'steps')
        job.process.terminate()
    code, output = job.finish()
    assert code == (75 if is_told else 0), output
    assert job.calls.exists() is is_told  # it is queued again
    assert job.signals.read_text().splitlines() == ['--signal=TERM 7', '--signal=KILL 7.0 7.12']


@pytest.mark.parametrize(('grace_s', 'waited'), [(10, 5), (20, 10), (120, 105)])
def test_roles_are_killed_well_before_the_time_limit(grace_s, waited, capsys):
    assert f'have_ended {waited};' in render([*LARGE, f'--grace_s={grace_s}'], capsys)


def test_the_steps_of_both_parts_of_a_heterogeneous_job_are_killed(capsys):
    assert 'jobs=$SLURM_JOB_ID\n' in render(LARGE, capsys)
    text = render([*LARGE, '--engine_partition=small'], capsys)
    assert 'jobs=$SLURM_JOB_ID_HET_GROUP_0,$SLURM_JOB_ID_HET_GROUP_1\n' in text


def test_learners_are_started_again_together_when_one_is_killed(programs, tmp_path, monkeypatch, capsys):
    job = Job(programs, tmp_path, monkeypatch, capsys, STAND_IN_STEPS='12')
    job.start()
    wait_until(lambda: len(job.events('learner')) == 2, 'the learners')
    os.kill(int(job.events('learner 1 start')[0].split()[3]), 9)
    code, output = job.finish()
    assert code == 0, output
    assert len(job.events('learner 0 start')) == len(job.events('learner 1 start')) == 2
