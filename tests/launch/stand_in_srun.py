"""Starts the tasks of an srun on this machine: python -m tests.launch.stand_in_srun PIDS FLAGS COMMAND...

PIDS gets the process of each task. --kill-on-bad-exit=1 ends all tasks with the first that fails: as SLURM does, with
SIGTERM, and after KillWait with SIGKILL.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time

KILL_WAIT_S = 3.0  # of SLURM: 30 s


def main():
    pids, words, tasks = pathlib.Path(sys.argv[1]), sys.argv[2:], 1
    output, kill_all = '', False
    while words[0].startswith('-'):
        word = words.pop(0)
        if word.startswith('-n'):
            tasks = int(word[2:])
        elif word.startswith('--output='):
            output = word.removeprefix('--output=')
        elif word == '--kill-on-bad-exit=1':
            kill_all = True
        elif word == '-w':
            words.pop(0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the batch script ignores it, and tasks are no children of that
    running = []
    for rank in range(tasks):
        environment = os.environ | {'SLURM_PROCID': str(rank), 'SLURMD_NODENAME': f'n{rank + 1}'}
        with open(output.replace('%t', str(rank)), 'ab') as log:
            running.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
        with pids.open('a') as file:
            file.write(f'{running[-1].pid}\n')
    killed_s = None
    while any(task.poll() is None for task in running):
        if kill_all and killed_s is None and any(task.poll() for task in running):
            killed_s = time.monotonic() + KILL_WAIT_S
            for task in running:
                task.terminate()
        if killed_s is not None and time.monotonic() > killed_s:
            for task in running:
                task.kill()
        time.sleep(0.05)
    return max(128 - task.returncode if task.returncode < 0 else task.returncode for task in running)


if __name__ == '__main__':
    sys.exit(main())
