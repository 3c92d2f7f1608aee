"""areal-watch: one frame, frames in a pipe, a terminal that is left as it was; its errors; it imports no jax."""

from __future__ import annotations

import os
import pathlib
import pty
import select
import signal
import subprocess
import sys
import termios
import threading

import pytest

from areal_jax import main_watch
from tests.report.busy_run import write_answers, write_busy_run

COMMAND = [sys.executable, '-m', 'areal_jax.main_watch']
DEADLINE_S = 60.0
LEAVES = b'\x1b[?1049l'  # the alternate screen


@pytest.fixture(scope='module')
def busy(tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp('main') / 'busy'
    write_busy_run(workdir, 6)
    write_answers(workdir, 6)
    return workdir


def test_one_frame_in_a_pipe_has_no_colour(busy: pathlib.Path, capsys, monkeypatch):
    monkeypatch.setenv('COLUMNS', '80')
    monkeypatch.setenv('LINES', '24')
    assert main_watch.main([str(busy), '--once']) == 0
    out = capsys.readouterr().out
    assert out.count('\n') == 24
    assert max(map(len, out.splitlines())) <= 80
    assert '\x1b' not in out
    assert 'busy  killed' in out


def test_frames_in_a_pipe_end_with_the_run(busy: pathlib.Path, capsys):
    assert main_watch.main([str(busy), '--every=0.1']) == 0  # no process uses it
    assert capsys.readouterr().out.count('answers ') == 1


def test_errors_are_one_sentence(busy: pathlib.Path, tmp_path: pathlib.Path, capsys):
    for arguments, said in (
        ([str(tmp_path / 'none'), '--once'], 'none yet: a run makes it when it starts'),
        ([str(busy), '--every=0'], '--every=0 must be at least 0.1 seconds'),
        ([], 'RUN'),
    ):
        code = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
        assert (code.returncode, code.stdout) == (2, '')
        assert said in code.stderr
        assert code.stderr.count('\n') == 1


@pytest.mark.parametrize('end', [b'q', b'\x03', signal.SIGTERM])
def test_a_terminal_is_left_as_it_was(busy: pathlib.Path, end: bytes | signal.Signals):
    """In a terminal of its own: q, Ctrl-C and SIGTERM end it with 0, out of the alternate screen, with echo on."""
    primary, secondary = pty.openpty()
    before = termios.tcgetattr(secondary)
    termios.tcsetwinsize(secondary, (24, 80))
    process = subprocess.Popen(
        [*COMMAND, str(busy), '--every=30'], stdin=secondary, stdout=secondary, stderr=secondary,
        start_new_session=True, preexec_fn=lambda: os.login_tty(os.dup(secondary)), env={**os.environ, 'TERM': 'xterm'},
    )  # fmt: skip
    guard = threading.Timer(DEADLINE_S, process.kill)
    guard.start()
    out = read_until(primary, b'v3-5')  # of an answer: the frame is there
    process.send_signal(end) if isinstance(end, signal.Signals) else os.write(primary, end)
    out += read_until(primary, LEAVES)
    assert process.wait() == 0
    guard.cancel()
    assert termios.tcgetattr(secondary) == before
    assert b'\x1b[?25h' in out  # the cursor is shown again
    os.close(primary)
    os.close(secondary)


def read_until(descriptor: int, wanted: bytes) -> bytes:
    out = b''
    while wanted not in out:
        ready, _, _ = select.select([descriptor], [], [], DEADLINE_S)
        assert ready, out
        out += os.read(descriptor, 65536)
    return out


def test_it_imports_no_jax(busy: pathlib.Path):
    watch = f'main_watch.main([{str(busy)!r}, "--once"])'
    code = f'import sys; from areal_jax import main_watch; {watch}; assert "jax" not in sys.modules'
    assert subprocess.run([sys.executable, '-c', code], check=False, capture_output=True).returncode == 0
