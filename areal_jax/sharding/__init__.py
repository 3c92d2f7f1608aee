"""Where arrays live: the devices of learner and engines, the mesh, and rules from parameter paths to its axes."""
