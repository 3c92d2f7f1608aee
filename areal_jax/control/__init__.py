"""Admission, buffer, controller, clocks and the event log: the host side of the loop, free of jax."""
