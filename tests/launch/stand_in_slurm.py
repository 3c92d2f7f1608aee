"""launch.slurm with roles that compute nothing: python -m tests.launch.stand_in_slurm, flags as of launch.slurm."""

from launch import cluster_run, slurm

cluster_run.MODULE = 'tests.launch.stand_in_peer'
slurm.run()
