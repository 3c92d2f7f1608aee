"""Products of rows with the matrix of their group, and both gradients, by the kernels of accelerators."""
