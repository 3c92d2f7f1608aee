"""Entry point of `python -m launch.ray`."""

import sys

from areal_jax.app.process.ending import RESUME, end_command

from .main import main

if __name__ == '__main__':
    sys.exit(end_command(lambda: main(sys.argv), doing='writing to the workdir', again=RESUME))
