"""What a run says of itself while it runs: metrics of each update, progress lines, memory. Imports no jax."""
