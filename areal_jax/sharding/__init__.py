"""Where arrays live: the device mesh, and rules from parameter paths to axes of the mesh."""
