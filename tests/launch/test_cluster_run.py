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
    with pytest.raises(UserError, match=r'^--workdir=gs://bucket/a is a URL, and a run needs a directory'):
        parse_command(['launch.ray', '--config=configs/tiny_cpu.py', '--workdir=gs://bucket/a'], values)


def test_engines_of_unequal_size_are_for_launch_local():
    values = flags.FlagValues()
    cluster_run.define_flags(values)
    cluster_run.define_shared(values)
    fields = ('cluster.learner=hosts=1 x data=1', 'cluster.engines=1 x tensor=2 + 1 x tensor=1', 'rollout.server=own')
    words = [f'--config.{field}' for field in (*fields, 'publication.channel=files', 'evaluation.every=0')]
    command = parse_command(['launch.ray', '--config=configs/tiny_cpu.py', '--workdir=/runs/a', *words], values)
    with pytest.raises(UserError, match=r"x tensor=1' has engines of unequal size, which launch.local alone starts"):
        cluster_run.build_run(command, '/runs/a', 'python')
