"""A run in roles on this machine: which commands, and who starts whom again.

An engine is started again alone. The learner processes are one program, which a lost one ends for all. The controller
goes on from its checkpoint, with learners that start anew. So whenever the controller or a learner is lost, all of them
start again as a new attempt, while the engines serve on.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from ml_collections import config_dict

from areal_jax import files
from areal_jax.app.process.accelerator import VISIBLE, find_gpus
from areal_jax.app.process.ending import Wakeups
from areal_jax.app.roles.roles import require_roles
from areal_jax.config.cluster import list_roles
from areal_jax.config.fields import ConfigError
from areal_jax.config.kinds import SERVER, find_server, resolve
from areal_jax.errors import ExitCode
from areal_jax.registry import require_usable

from .gpus import share_gpus
from .heartbeats import Heartbeats, Signs
from .keeper import SIGNALLED, describe_code
from .programs import Program, Server, describe_command, say, start_logged

ROLE = 'areal_jax.main_role'
LOGS = 'logs'  # in the workdir: a file for each role and attempt
_HOST_DEVICES = 'xla_force_host_platform_device_count'
_LOOK_S = 0.2
_STEADY_S = 60.0  # an attempt that lived so long has started well
MOST_RESTARTS = 5  # of controller and learners, in a row
LONGEST_PAUSE_S = 30.0  # before a restart
NOTICE_S = 20.0  # for controller and learners to notice that one of them has ended, and to end
KILLED_NOTICE_S = 2.0  # the same where a signal ended it: the others have nothing to add
STOP_S = 10.0  # for what is left to end after SIGTERM
_ABORTED = SIGNALLED + signal.SIGABRT  # jax does so to a learner process that loses the one that coordinates
_EXPORT_S = 600.0  # for the exporter to write what is due when the run has finished
_TOGETHER = ('controller', 'learner')  # roles that are started again together
_QUOTED = 5  # last lines of a log, in an error


@dataclasses.dataclass(frozen=True)
class RoleCommand:
    """One process of a run."""

    role: str
    index: int
    command: Sequence[str]
    variables: dict[str, str]  # added to the environment
    registers: bool = True  # it is in the registry soon after its start

    @property
    def name(self) -> str:
        return f'{self.role}-{self.index}'


def plan_roles(
    config: config_dict.ConfigDict,
    words: Sequence[str],
    environment: Mapping[str, str] | None = None,
    gpus: Sequence[str] = (),
) -> list[RoleCommand]:
    """The commands of all roles.

    Args:
      words: of the command line of main_role, besides those that say which role.
      environment: of this process; its XLA_FLAGS are extended. Virtual devices exist where jax computes on the CPU.
      gpus: of this machine, which the processes share out; see gpus.py.

    Raises ConfigError where they need more GPUs than there are.
    """
    shared, launch = share_gpus(config, gpus), find_server(config.rollout.server).launch
    given = re.sub(rf'--{_HOST_DEVICES}=\d+ ?', '', (environment or {}).get('XLA_FLAGS', '')).strip()
    planned = []
    for entry in list_roles(config):
        for index in range(entry.count):
            flags = f'{given} --{_HOST_DEVICES}={entry.devices_of(index)}'.strip()
            which = [f'--role={entry.role}', f'--index={index}', f'--count={entry.count}']
            command = [sys.executable, '-m', ROLE, *which, *words]
            variables = {'XLA_FLAGS': flags} if entry.devices and not gpus else {}
            if visible := shared.get(f'{entry.role}-{index}'):
                variables = {VISIBLE: visible}
            registers = entry.role != 'engine' or (launch is not None and launch.registers_at_start)
            planned.append(RoleCommand(entry.role, index, command, variables, registers))
    return planned


def run_roles(
    config: config_dict.ConfigDict,
    workdir: pathlib.Path,
    words: Sequence[str],
    environment: dict[str, str],
    *,
    resume: bool,
    dry_run: bool,
) -> int:
    """Starts all roles and keeps them running until the controller ends; returns its exit code.

    Raises UserError for a run that cannot be in roles, and for a workdir that is used and not resumed.
    """
    require_roles(config)
    planned = plan_roles(config, words, environment, find_gpus(environment))
    if dry_run:
        print(*(describe_command(role.command, role.variables) for role in planned), sep='\n')
        return ExitCode.FINISHED
    launch = find_server(config.rollout.server).launch
    if launch and launch.require:
        resolve(launch.require, SERVER)()
    from areal_jax.app.workdir.run_directory import holds_run  # here: it imports the report, which --help does not need

    if holds_run(workdir) != resume:
        fix = 'start without --resume' if resume else 'go on with --resume, or give another --workdir'
        raise ConfigError(f'{workdir} holds {"no run yet" if resume else "a run already"}: {fix}')
    lock = files.DirectoryLock(workdir / LOGS)
    try:
        require_usable(workdir)
        return _Roles(planned, workdir / LOGS, Heartbeats(workdir)).run()
    finally:
        lock.release()


def find_cause(codes: Mapping[str, int]) -> tuple[str, bool]:
    """Which of the processes that ended made the others end, and whether it would fail again.

    Args:
      codes: exit codes by name, the first end first; not all are 0.
    """
    if refused := [name for name, code in codes.items() if code == ExitCode.USER_ERROR]:
        return refused[0], True
    if killed := [name for name, code in codes.items() if code > SIGNALLED and code != _ABORTED]:
        return killed[0], False  # an error after that is no bug of its own
    first = next(name for name, code in codes.items() if code)
    return first, codes[first] == ExitCode.BUG


def find_patience(code: int) -> float:
    """Seconds for which the others may end by themselves after this exit code of the first.

    Those that are not yet connected to it do not notice. One that ended by itself may have done so because of an error
    of another one, whose exit code is still to come.
    """
    return KILLED_NOTICE_S if code > SIGNALLED else NOTICE_S


class _Roles:
    """All processes of a run. The first stop signal goes to the controller, the second one too, the third kills all."""

    def __init__(self, planned: Sequence[RoleCommand], logs: pathlib.Path, heartbeats: Heartbeats):
        self._heartbeats, self._logs = heartbeats, logs
        self._together = [role for role in planned if role.role in _TOGETHER]
        self._engines = [self._plan_server(role) for role in planned if role.role == 'engine']
        self._exporters = [self._plan_server(role) for role in planned if role.role == 'exporter']
        self._programs: dict[str, Program] = {}  # of controller and learners, by name
        self._paths: dict[str, pathlib.Path] = {}  # their logs
        self._ended: dict[str, int] = {}  # exit codes of those that have, the first one first
        self._shown = 0  # bytes of the controller's log that were printed
        self._stops = self._restarts = 0
        self._is_deserted = False
        self._started_s = self._due_s = 0.0
        self._lost_s: float | None = None  # since when one of them is gone

    def _plan_server(self, role: RoleCommand) -> Server:
        """A process that is started again alone."""
        next_log = functools.partial(self._next_log, role.name)
        return Server(role.name, role.command, next_log, role.variables, registers=role.registers)

    def run(self) -> int:
        """Until the controller ends for good; its exit code."""
        with Wakeups() as wakeups:
            try:
                self._start()
                while (code := self._look(wakeups)) is None:
                    pass
                return code
            finally:
                self._end(wakeups)

    def _start(self) -> None:
        """One attempt of controller and learners."""
        self._started_s, self._lost_s, self._shown = time.monotonic(), None, 0
        self._ended = {}
        for role in self._together:
            path = self._paths[role.name] = self._next_log(role.name)
            self._programs[role.name] = start_logged(role.command, path, role.variables)

    def _look(self, wakeups: Wakeups) -> int | None:
        """The exit code when the run is over."""
        numbers, _ = wakeups.wait(_LOOK_S)
        for number in numbers:
            self._stop(number)
        if not self._programs:  # between two attempts
            if self._stops:
                return ExitCode.STOPPED
            if time.monotonic() >= self._due_s:
                self._start()
        signs = self._heartbeats.look()
        if not self._stops:
            for server in (*self._engines, *self._exporters):
                server.look(signs)
            self._end_hanging(signs)
            self._notice_deserted()
        self._show()
        ended = {name: code for name, program in self._programs.items() if (code := program.poll()) is not None}
        self._ended.update({name: code for name, code in ended.items() if name not in self._ended})
        return self._judge(self._ended) if self._ended else None

    def _judge(self, codes: dict[str, int]) -> int | None:
        """What follows from the processes that have ended, the first one first."""
        controller = codes.get(self._together[0].name)
        if controller in (ExitCode.FINISHED, ExitCode.NOTHING_TRAINED):
            return controller
        if not any(codes.values()):
            return None  # a learner that was let go waits for no other process
        cause, is_final = find_cause(codes)
        now = time.monotonic()
        self._lost_s = self._lost_s or now
        is_early = now - self._lost_s < find_patience(codes[cause])
        is_waiting = len(codes) < len(self._programs) and is_early and self._stops < 3
        if is_waiting and codes[cause] != ExitCode.USER_ERROR:
            return None  # the others notice it and end
        if is_final:
            say(f'{cause} {describe_code(codes[cause])}; the end of {self._paths[cause]}:\n{self._quote(cause)}')
            return codes[cause]
        for program in self._programs.values():
            program.kill()
        if self._is_deserted:
            return ExitCode.USER_ERROR
        if self._stops:
            return ExitCode.STOPPED
        return self._restart(cause, codes[cause])

    def _restart(self, first: str, code: int) -> int | None:
        """A new attempt when it is due; the exit code where there were too many."""
        lived_s = time.monotonic() - self._started_s
        self._restarts = 1 if lived_s >= _STEADY_S else self._restarts + 1
        said = f'{first} {describe_code(code)} after {lived_s:.0f} s'
        if self._restarts > MOST_RESTARTS:
            say(f'{said}, {MOST_RESTARTS} restarts in a row; the end of {self._paths[first]}:\n{self._quote(first)}')
            say('the same command with --resume goes on')
            return ExitCode.STOPPED
        pause_s = min(2.0 ** (self._restarts - 1), LONGEST_PAUSE_S)
        say(f'{said}: controller and learners are started again in {pause_s:.0f} s; see {self._paths[first]}')
        self._programs, self._ended, self._due_s = {}, {}, time.monotonic() + pause_s
        return None

    def _stop(self, number: signal.Signals) -> None:
        self._stops += 1
        if self._stops > 2:
            say(f'{number.name}: everything is killed')
            for program in self._programs.values():
                program.kill()
        else:
            self._tell_controller(number)

    def _end_hanging(self, signs: Signs | None) -> None:
        for name, program in self._programs.items():
            if signs and program.poll() is None and program.hangs(signs):
                say(f'{name} has given no sign of life for a long time: it is killed')
                program.kill()

    def _notice_deserted(self) -> None:
        if self._engines and not self._is_deserted and all(engine.is_over for engine in self._engines):
            self._is_deserted = True
            say('no engine is left: the controller is told to save and stop')
            self._tell_controller(signal.SIGTERM)

    def _tell_controller(self, number: signal.Signals) -> None:
        """Nothing between two attempts."""
        if (controller := self._programs.get(self._together[0].name)) is not None:
            controller.send(number)

    def _show(self) -> None:
        """Prints what the controller has said since the last look."""
        with self._paths[self._together[0].name].open('rb') as log:
            log.seek(self._shown)
            said = log.read()
        self._shown += len(said)
        if said:
            say(said.decode(errors='replace').rstrip('\n'))

    def _quote(self, name: str) -> str:
        lines = self._paths[name].read_text(errors='replace').splitlines()
        return '\n'.join(f'  {line}' for line in lines[-_QUOTED:])

    def _next_log(self, name: str) -> pathlib.Path:
        """WORKDIR/logs/learner-0.2.log for the second start of this process in the life of the workdir."""
        taken = [int(path.name.split('.')[-2]) for path in self._logs.glob(f'{name}.*.log')]
        return self._logs / f'{name}.{max(taken, default=0) + 1}.log'

    def _end(self, wakeups: Wakeups) -> None:
        """Lets the learners end, whom the controller has told to, and tells the engines; kills what is left."""
        engines, exporters = (
            [server.program for server in servers if server.program is not None]
            for servers in (self._engines, self._exporters)
        )
        for program in (*engines, *exporters):
            program.send(signal.SIGTERM)
        self._wait_for([*self._programs.values(), *engines], STOP_S, wakeups)
        self._show()
        for program in (*self._programs.values(), *engines):
            program.kill()
        self._wait_for(exporters, _EXPORT_S, wakeups)
        for program in exporters:
            program.kill()

    def _wait_for(self, programs: Sequence[Program], most_s: float, wakeups: Wakeups) -> None:
        """Returns when they have ended, after `most_s`, or at a signal."""
        end_s = time.monotonic() + most_s
        while any(program.poll() is None for program in programs) and time.monotonic() < end_s:
            numbers, _ = wakeups.wait(_LOOK_S)
            if numbers:
                break
