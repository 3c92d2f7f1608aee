"""Placement of arrays: the devices of learner and engines, the mesh, and rules from parameter paths to its axes."""
