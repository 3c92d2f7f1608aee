"""Measurements of a run while it runs: metrics of each update, progress lines, memory. Imports no jax."""
