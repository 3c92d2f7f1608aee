"""Beside the loop: what it did, as metrics, a progress line, a timeline, plots and a report. Imports no jax."""
