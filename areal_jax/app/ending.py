"""How a command ends: exceptions become one sentence and an exit code; every main_*.py runs inside `end_command`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from areal_jax.errors import ExitCode, LostPeerError, UserError, describe_disk_trouble, describe_memory_trouble


def end_command(command: Callable[[], int], doing: str) -> int:
    """The exit code of `command`, or of the exception that it raises; see errors.ExitCode.

    Args:
      doing: what the command does to a disk, for errors that carry no file name: 'writing to runs/tiny'.
    """
    try:
        return command()
    except UserError as error:
        print(f'error: {error}', file=sys.stderr, flush=True)
        return ExitCode.STOPPED if isinstance(error, LostPeerError) else ExitCode.USER_ERROR
    except KeyboardInterrupt:
        print('stopped; the same command with --resume goes on', file=sys.stderr, flush=True)
        return ExitCode.STOPPED
    except Exception as error:
        if sentence := describe_disk_trouble(error, doing) or describe_memory_trouble(error):
            print(f'error: {sentence}', file=sys.stderr, flush=True)
            return ExitCode.USER_ERROR
        traceback.print_exc()
        return ExitCode.BUG
