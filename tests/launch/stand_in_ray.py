"""launch.ray with roles that compute nothing: python -m tests.launch.stand_in_ray, with the flags of launch.ray."""

import sys

from areal_jax.app.process.ending import end_command
from launch import cluster_run
from launch.ray.main import main

cluster_run.MODULE = 'tests.launch.stand_in_peer'
sys.exit(end_command(lambda: main(sys.argv), doing='writing to the workdir'))
