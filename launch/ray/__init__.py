"""Places a run on a Ray cluster: python -m launch.ray. Here `import ray` is Ray itself, as imports are absolute.

plan.py says which process gets which bundle, actor.py runs one process, supervision.py replaces what was lost. Ray sees
no tensor and no request of the run: roles speak to each other directly.

A package and not a file ray.py: Ray puts the folder of the started file on the path of its workers, where that file
would be found in place of Ray.
"""
