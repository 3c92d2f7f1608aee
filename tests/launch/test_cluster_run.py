"""What all executors refuse."""

import pytest
from absl import flags

from areal_jax.app.command_line import parse_command
from areal_jax.errors import UserError
from launch import cluster_run


def test_a_url_is_no_workdir():
    values = flags.FlagValues()
    cluster_run.define_flags(values)
    cluster_run.define_shared(values)
    command = parse_command(['launch.ray', '--config=configs/tiny_cpu.py', '--workdir=gs://bucket/a'], values)
    with pytest.raises(UserError, match=r'^--workdir=gs://bucket/a is a URL, and a run needs a directory'):
        cluster_run.locate_run(command, values)
