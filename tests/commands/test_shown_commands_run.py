"""Every command that README.md or a page shows is run, page by page and in its order, in a directory like a clone.

    python -m pytest -m slow tests/commands/test_shown_commands_run.py

CHANGES is the list of what differs from the page, and why; every other command is run as it is shown. A run that a page
takes as given is made once, by the command in GIVEN, and copied. COUNTS says how many commands are run in which way.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pathlib
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest

from tests.app import hub
from tests.commands import reader_files
from tests.commands.test_shown_commands import ROOT, find_command, list_lines, list_shown, split_line
from tests.stub_hub import StubHub, serving
from tests.test_docs import PAGES

SECONDS = 1800  # of one command, on a machine that does other things too
FEW = '--config.evaluation.problems=2 --config.evaluation.samples=1'
FEW_PASSES = (  # a command runs its programs a few times: most of its time would be passes of LLVM
    '--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1'
)
ANY_REWARD = '--config.learner.filter_equal_rewards=False'  # a drawn model gets none


@dataclasses.dataclass(frozen=True)
class Change:
    """How commands whose line matches `of` are run.

    Args:
      of: a pattern.
      why: the reason.
      add: words behind those of the page.
      way: 'shortened'; 'dry run'; 'told': it ends with the sentence on what is not installed here; 'refused': with the
        error that the page shows.
      says: a pattern in the output.
      devices: virtual devices of the CPU in place of those of the reader.
    """

    of: str
    why: str
    add: str = ''
    way: str = 'shortened'
    says: str = ''
    devices: int = 0


TRAINS = r'^(?!.*dry_run)(areal-train|\S+ -m (areal_jax\.main_train|launch\.local)) .*--config='
ROLES = r'^areal-role .*--config='
NEW = r'(?!.*(run\.steps|--resume))'  # a page that says how many updates has few
SUPERVISED = r'\S*(sft|dpo|reward_model)'
CHANGES = (
    Change('launch.local .*server=vllm', 'vLLM is no part of the project', way='told', says='vllm_environment.sh'),
    Change('launch.local .*server=sglang', 'SGLang is no part of it', way='told', says='sglang_environment.sh'),
    Change('server=jetstream', 'JetStream is no part of it', way='told', says='jetstream'),
    Change('tracker=wandb', 'no account', way='told', says='needs the package wandb, which is not installed'),
    Change('name=verifiers:', 'it has an environment of its own', way='told', says='verifiers_environment.sh'),
    Change('launch.ray .*--local_nodes$', 'Ray is no part of the project', way='told', says='ray'),
    Change(
        's3://bucket', 'its packages are an extra', way='told', says='needs the package s3fs, which is not installed'
    ),
    Change('areal-aot', 'its compilers are extras', way='told', says='which is not installed: pip install'),
    Change('options.lettres=', 'the page shows this error', way='refused', says='lettres'),
    Change('runs/broken', 'the page shows these errors', way='refused', says='error: '),
    Change(r'^(?!.*(dry_run|local_nodes)).*launch\.(slurm|jobset|ray)', 'no cluster', add='--dry_run', way='dry run'),
    Change('sweeps/(staleness|stale_methods|frictions).py', 'hours', add='--dry_run', way='dry run'),
    Change('main_sweep .*tiny.py|sweep .*tiny.py .*jobs=2', '6 arms', add='--only=eta?_seed0 --config.run.steps=2'),
    Change('sweeps/eta.py', '18 arms of 250 updates', add='--only=eta?_seed0 --config.run.steps=2'),
    Change('path=/models/Qwen2.5-7B-Instruct', 'no GPUs', devices=10),
    Change(f'{TRAINS}{NEW}', '16 to 229 updates', add='--config.run.steps=3'),
    Change(f'{ROLES}{NEW}', '200 updates', add='--config.run.steps=3'),
    Change('steps=198 .*blocks=3', '198 updates', add='--config.run.steps=6'),
    Change('quickstart.* --resume', '8 further updates', add='--config.run.steps=10'),
    Change('remainders.py', '16 updates', add='--config.run.steps=3'),
    Change(TRAINS + r'(?!\S*sft)\S*(quickstart|arithmetic|code.py|gsm8k|shop|my_config)', 'no rewards', add=ANY_REWARD),
    Change(f'{TRAINS}(?!{SUPERVISED})(?!.*problems=(?!32))', '4 to 96 problems', add=FEW),
    Change(
        f'{TRAINS}{SUPERVISED}',
        '8 to 64 problems',
        add='--config.evaluation.problems=2 --config.optimizer.warmup_steps=1',
    ),
    Change('areal-simulate .*--config=(?!.*run.steps)', 'minutes', add='--config.run.steps=1'),
    Change('(simulate/agents|MY_AGENT).py', '64 episodes', add='--config.learner.groups_per_update=4'),
    Change('areal-plan', 'minutes', add="--cluster='8 x H100' --answers=32 --max_eta=1"),
    Change('areal-plan (?!.*lengths=runs)', 'minutes', add="--lengths='constant(100)'"),
    Change('(areal-eval|main_eval) .*(quickstart|shop)', '32 to 64 problems', add=FEW),
)
PLACES = (  # what a page leaves to the reader, or what is in another place here
    (r'^(?!.*launch\.)(.*[= ])/(shared|mnt|models)/', r'\1\2/'),
    (r'\bRUN\b', 'runs/tiny'),
    (r'check-log FILE\b', 'check-log runs/tiny'),
    (r'portable=FILE\b', 'portable=tiny.replay'),
    (r'\bSHELL\b', 'bash'),
    (r'(--config=configs/(quickstart|tiny_cpu).py --answers=)answers', r'\1runs/\2_eval/answers'),
)
GIVEN = {  # by the first pattern that matches a name; {} is that name
    r'runs/tiny(_cpu)?_eval': 'areal-eval --config=configs/tiny_cpu.py --model=runs/tiny --workdir={}',
    r'runs/quickstart_eval': f'areal-eval --config=configs/quickstart.py --workdir={{}} {FEW}',
    r'runs/mixture': 'areal-train --config=configs/mixture.py --workdir={} --config.run.steps=3',
    r'runs/(quickstart|gsm8k_sft|one|two|three)': (
        f'areal-train --config=configs/quickstart.py --workdir={{}} {ANY_REWARD} {FEW} --config.run.steps=8'
    ),
    r'': (
        'areal-train --config=configs/tiny_cpu.py --workdir={} --config.run.steps=20 --config.checkpoint.every=20 '
        '--config.telemetry.rollouts=all'
    ),
}
COUNTS = {'shortened': 95, 'as shown': 87, 'served': 7, 'dry run': 12, 'told': 17, 'refused': 3}


@dataclasses.dataclass(frozen=True)
class Step:
    """A command of a page: its words as shown, its variables, and whether it ends with '&'."""

    words: tuple[str, ...]
    program: str
    variables: tuple[tuple[str, str], ...] = ()
    beside: bool = False

    @property
    def line(self) -> str:
        return shlex.join(self.words)

    @property
    def changes(self) -> list[Change]:
        return [change for change in CHANGES if re.search(change.of, self.line)]

    @property
    def way(self) -> str:
        """'told', 'refused', 'dry run' or 'shortened' by its changes; else 'served' or 'as shown'."""
        ways = {change.way for change in self.changes}
        own = 'served' if self.program == 'areal-serve' else 'as shown'
        return next((way for way in ('told', 'refused', 'dry run', 'shortened') if way in ways), own)

    @property
    def says(self) -> str:
        """A pattern of what it prints."""
        return next((change.says for change in self.changes if change.says), '')

    def list_words(self) -> list[str]:
        """The words that are run: with what PLACES fills in, and the words of its changes behind."""
        line = self.line
        for pattern, replacement in PLACES:
            line = re.sub(pattern, replacement, line)
        return shlex.split(' '.join([line, *(change.add for change in self.changes)]))


def list_steps(text: str) -> list[Step]:
    """The commands of this project on a page, in its order; those in a loop once for each of its first two values."""
    steps, values = [], ['']
    for line in list_lines(text):
        loop = re.match(r'for \w+ in (.+?);', line)
        values = loop[1].split()[:2] if loop else values
        variables = tuple(re.findall(r'([A-Z_]+)=(\S+)', re.match(r'(?:[A-Z_]+=\S+\s+)*', line)[0]))
        for value in values if re.search(r'\$\w', line) else ['']:
            if re.search(r'(^| )\[', line):
                continue
            for words in split_line(re.sub(r'\$\w+', value, line)):
                if (shown := find_command(words)) and '...' not in words:
                    steps.append(Step(tuple(words), shown[0].program, variables, line.endswith('&')))
    return steps


STEPS = {page: list_steps(page.read_text()) for page in PAGES}
STEPS = {page: steps for page, steps in STEPS.items() if steps}


MAKERS = {'areal-train', 'areal-eval', 'areal-sweep', 'areal-simulate', 'areal-role'}  # of what --workdir names
RUNS = re.compile(r'(?<![\w/])((?:shared/|mnt/)?runs/\w+|shared/runs$|models/[\w.-]+)')


def list_made(step: Step, words: list[str]) -> set[str]:
    """The directories that a command makes."""
    flags = ['--out=', '--config.distributed.average_directory=']
    if (step.program in MAKERS or 'launch.' in step.program) and '--resume' not in words:
        flags.append('--workdir=')
    return {word.partition('=')[2] for word in words if word.startswith(tuple(flags))}


@dataclasses.dataclass(frozen=True)
class World:
    """What all readers share: runs that pages take as given, variables of the environment, a Hub."""

    given: pathlib.Path
    variables: dict[str, str]
    hub: StubHub

    def make(self, name: str) -> pathlib.Path:
        """A run that pages take as given, or a model; it is made by the first that needs one like it."""
        if name.startswith('models/'):
            return self.make_model()
        place, command = next(
            (place, command) for place, (pattern, command) in enumerate(GIVEN.items()) if re.match(pattern, name)
        )
        kept = self.given / str(place)
        if not kept.exists():
            remove(self.given / f'{place}.made')  # of a page before this, which failed
            maker = Reader(self, self.given / f'{place}.made')
            maker.do(Step(tuple(shlex.split(command.format(name))), command.partition(' ')[0]))
            (maker.cwd / name).rename(kept)
        return kept

    def make_model(self) -> pathlib.Path:
        """A directory of Hugging Face files."""
        kept = self.given / 'model'
        if not kept.exists():
            shutil.copytree(self.make('runs/quickstart') / 'export', kept)
            reader_files.rename_tokens(kept)
        return kept

    def fill_hub(self) -> None:
        """Gives the Hub the repositories that pages name."""
        if not self.hub.repositories:
            self.hub.repositories = reader_files.list_repositories(self.make_model())


class Reader:
    """Someone who goes through a page, in a directory of their own; its commands may be independent examples."""

    def __init__(self, world: World, cwd: pathlib.Path, page: str = '', independent: bool = False):
        self.world, self.cwd, self.independent = world, cwd, independent
        self.copied: set[str] = set()
        self.waiting: list[Running] = []
        reader_files.make_clone(cwd, page)

    def do(self, step: Step) -> None:
        """Runs a command in its way; fails if it does not end as it should."""
        words = step.list_words()
        made = list_made(step, words)
        beside = step.beside or step.program == 'areal-role'
        if not beside:
            self.wait()
            for name in made if self.independent else made & self.copied:
                remove(self.cwd / name)  # else it would find a run that is not its own
        for name in sorted(set(RUNS.findall(' '.join(words))) - made):
            self.take(name)
        if 'hf:' in step.line or 'configs/clusters' in step.line:
            self.world.fill_hub()
        variables = self.world.variables | dict(step.variables)
        flags = [FEW_PASSES, variables.get('XLA_FLAGS', '')]
        if devices := max((change.devices for change in step.changes), default=0):
            flags.append(f'--xla_force_host_platform_device_count={devices}')
        variables['XLA_FLAGS'] = ' '.join(flags)
        if '--push' in step.line:
            variables['HF_ENDPOINT'] = variables['PUSHED_TO']
        running = Running(words, self.cwd, variables)
        if beside:
            self.waiting.append(running)
        elif step.way == 'served':
            running.end_when_healthy()
        else:
            running.finish(2 if step.way in ('told', 'refused') else 0, step.says)

    def take(self, name: str) -> None:
        """Copies a run that the page takes as given, if no command of the page has made it."""
        name = {'shared/runs': 'shared/runs/qwen3_8b'}.get(name, name)
        if not (self.cwd / name).exists():
            shutil.copytree(self.world.make(name), self.cwd / name)
            self.copied.add(name)

    def wait(self) -> None:
        """Waits for the commands that were started beside others."""
        while self.waiting:
            self.waiting.pop(0).finish()


def remove(path: pathlib.Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


class Running:
    """A command of this environment, started as a shell in a clone starts it; its output goes to a file."""

    def __init__(self, words: list[str], cwd: pathlib.Path, variables: dict[str, str]):
        name = words[0].rpartition('/')[2]
        python = pathlib.Path(sys.executable)
        program = python if name.startswith('python') else python.with_name(name)
        self.port = find_free_port()
        self.words = [str(program), *(re.sub(r'^--port=\d+$', f'--port={self.port}', word) for word in words[1:])]
        self.output = (cwd / f'.output_{time.monotonic_ns()}').open('w+')
        self.process = subprocess.Popen(
            self.words, cwd=cwd, env=variables, stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True
        )

    def finish(self, code: int = 0, says: str = '') -> None:
        """Waits for the end; fails for another exit code, or for an output without `says`."""
        try:
            found = self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            found = f'none after {SECONDS} s'
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.output.seek(0)
        printed = self.output.read()
        self.output.close()
        shown = f'{shlex.join(self.words)}\nexit code {found}, expected {code}; it printed\n{printed[-6000:]}'
        assert found == code, shown
        assert re.search(says, printed), f'{says!r} is not in the output of {shown}'

    def end_when_healthy(self) -> None:
        """Asks a server for its health until it answers, and ends it by SIGTERM."""
        healthy, end = False, time.monotonic() + SECONDS
        while not healthy and self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.5)
            with contextlib.suppress(OSError), urllib.request.urlopen(f'http://127.0.0.1:{self.port}/health') as reply:
                healthy = reply.status == 200
        self.process.send_signal(signal.SIGTERM)
        self.finish()
        assert healthy, f'{self.words} ended before it was healthy'


def find_free_port() -> int:
    with socket.socket() as taken:
        taken.bind(('127.0.0.1', 0))
        return taken.getsockname()[1]


@pytest.fixture(scope='module')
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp('world')
    reader_files.write_small_package(folder)
    kept = {name: text for name, text in os.environ.items() if not name.startswith(('XLA_', 'AREAL_JAX_', 'HF_'))}
    with serving({}) as stub, hub.serving_hub() as pushed:
        yield World(folder / 'given', kept | {
            'PYTHONPATH': f'{folder}:{ROOT}', 'HF_HOME': str(folder / 'hf'), 'HF_ENDPOINT': stub.address,
            'HF_TOKEN': hub.TOKEN, 'PUSHED_TO': pushed.url,
        }, stub)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize('page', STEPS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_commands_of_a_page_run(page: pathlib.Path, world: World, tmp_path: pathlib.Path) -> None:
    reader = Reader(world, tmp_path, page.read_text(), independent=page.name == 'commands.md')
    for step in STEPS[page]:
        before, cpu = time.monotonic(), read_cpu()
        reader.do(step)
        print(f'{step.way:9} {time.monotonic() - before:6.1f} s, CPU {read_cpu() - cpu:6.1f} s  {step.line}')
    reader.wait()


def read_cpu() -> float:
    """CPU seconds of all commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_every_command_is_run_in_one_of_the_ways():
    for page, steps in STEPS.items():
        assert len(steps) >= len(list_shown(page.read_text())), page
    every = [step for steps in STEPS.values() for step in steps]
    assert collections.Counter(step.way for step in every) == COUNTS
    assert [change for change in CHANGES if not any(change in step.changes for step in every)] == []


def test_the_workdir_of_a_new_run_is_new_on_its_page():
    """It would be refused after another command of the page; the examples of docs/commands.md are independent."""
    for page, steps in STEPS.items():
        named: set[str] = set()
        for step in steps if page.name != 'commands.md' else ():
            if step.program in ('areal-train', 'areal-simulate') and not {'--resume', '--dry_run'} & {*step.words}:
                made = {word.partition('=')[2] for word in step.words if word.startswith('--workdir=')}
                assert not made & named, (page, made)
            if step.way != 'refused':
                named |= set(RUNS.findall(' '.join(step.words)))
