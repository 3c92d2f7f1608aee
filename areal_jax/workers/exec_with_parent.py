"""Becomes another program that the kernel kills when the caller ends: `python -I -S FILE PARENT_PID COMMAND ...`.

Run by its path (agents/mcp_tools.py), so that it starts in a few milliseconds: it imports nothing of this package.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(parent: int, command: list[str]) -> int:
    """Becomes the command. Returns only if the parent has ended, or if the command cannot start (message on stderr)."""
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before
        return 1
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f'{command[0]}: {error.strerror}', file=sys.stderr)
    return 127


if __name__ == '__main__':
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
