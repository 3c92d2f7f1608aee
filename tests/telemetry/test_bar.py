"""The bar on a pseudo-terminal: what a person sees, what a pipe gets, and the terminal after Ctrl-C."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest

from areal_jax.telemetry.progress import Bar, can_show_bar

PARTS = """
import sys, time
from areal_jax.telemetry.progress import StartProgress
start = StartProgress(True)
start.begin('loading m.gguf')
time.sleep(0.6)
for done in range(1, 6):
    start.count_bytes(done * 10**6, 10**7)
    time.sleep(0.15)
print('a warning', flush=True)
start.begin('compiling what trains:')
time.sleep(0.6)
start.count_programs(2, 4)
time.sleep(0.4)
start.end()
start.begin_silently('exporting')
time.sleep(0.8)
start.end()
print('done')
"""
LINES = ['loading m.gguf', 'a warning', 'compiling what trains:', 'done']


def start_on_terminal(program: str, **variables: str) -> tuple[subprocess.Popen[bytes], int]:
    ours, theirs = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ('CI', 'COLUMNS', 'NO_COLOR')}
    environment |= {'TERM': 'xterm', 'COLUMNS': '80', **variables}
    child = subprocess.Popen(
        [sys.executable, '-c', program], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    return child, ours


def read_all(descriptor: int) -> str:
    content = b''
    while True:
        try:
            content += (read := os.read(descriptor, 65536))
        except OSError:  # the other side is closed
            break
        if not read:
            break
    os.close(descriptor)
    return content.decode()


def show(content: str) -> list[str]:
    """The lines that are left on the screen: \\r, line feeds, and the moves up and erasures of the bar."""
    screen, row, column = [''], 0, 0
    for move, text in re.findall(r'(\x1b\[[?\d;]*[A-Za-z]|\r|\n)|([^\x1b\r\n]+)', content):
        if text:
            screen[row] = (screen[row][:column].ljust(column) + text + screen[row][column + len(text) :]).rstrip()
            column += len(text)
        elif move == '\n':
            row += 1
            screen += [''] * (row == len(screen))
        elif move == '\r':
            column = 0
        elif move == '\x1b[2K':
            screen[row] = ''
        elif match := re.fullmatch(r'\x1b\[(\d+)A', move):
            row -= int(match[1])
    return [line for line in screen if line]


def test_a_terminal_shows_the_time_left_and_is_clean_afterwards():
    child, terminal = start_on_terminal(PARTS)
    content = read_all(terminal)
    assert child.wait(30) == 0
    plain = re.sub(r'\x1b\[[\d;?]*[A-Za-z]', '', content)
    assert re.search(r'loading m\.gguf [━╸╺ ]+ 5 of 10 MB, \ds left', plain)
    assert re.search(r'compiling what trains [━╸╺ ]+ 2 of 4 programs, \ds left', plain)
    assert re.search(r'exporting [━╸╺ ]+ 1s', plain)
    assert show(content) == LINES
    assert '\x1b[?25l' not in content  # the cursor is never hidden


@pytest.mark.parametrize('variables', [{'TERM': 'dumb'}, {'CI': 'true'}])
def test_no_bar_where_nobody_could_see_it(variables):
    child, terminal = start_on_terminal(PARTS, **variables)
    content = read_all(terminal)
    assert child.wait(30) == 0
    assert content.split('\r\n') == [*LINES, '']


def test_a_pipe_gets_the_lines_alone():
    done = subprocess.run([sys.executable, '-c', PARTS], capture_output=True, text=True, check=True)
    assert (done.stdout.splitlines(), done.stderr) == (LINES, '')


def test_a_process_that_ends_at_once_leaves_the_cursor_on_an_empty_line():
    program = PARTS.replace('time.sleep(0.6)', 'time.sleep(60)', 1)
    program = f'import os, signal\nsignal.signal(signal.SIGINT, lambda *_: os._exit(75))\n{program}'
    child, terminal = start_on_terminal(program)
    seen = b''
    end = time.monotonic() + 60
    while b'1s' not in seen:
        assert time.monotonic() < end, seen
        seen += os.read(terminal, 65536)
    child.send_signal(signal.SIGINT)
    assert child.wait(30) == 75
    content = seen.decode() + read_all(terminal)
    assert re.search(r'1s *(\x1b\[\d*m)*\r?\n(\x1b\[\d*m)*$', content) or content.endswith('\n')
    assert '\x1b[?25l' not in content


def test_the_time_left_follows_what_was_done(monkeypatch: pytest.MonkeyPatch):
    # 4 of 10 in 8 s: 2 s each, 12 s left; one second later 11
    clock = iter([100.0, 108.0])
    monkeypatch.setattr(time, 'monotonic', lambda: next(clock))
    bar = Bar()
    bar.begin('exporting')
    assert bar.describe(103.0) == '3s'
    bar.count(4, 10, 'programs')
    assert bar.describe(108.0) == '4 of 10 programs, 12s left'
    assert bar.describe(109.0) == '4 of 10 programs, 11s left'
    assert bar.describe(900.0) == '4 of 10 programs, 0s left'


def test_captured_output_is_no_terminal():
    assert not can_show_bar(sys.stdout)
    assert not Bar().is_possible
