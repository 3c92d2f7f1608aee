"""Clocks: every wait on the host goes through a clock (run, wait, call, now), which orders all completions."""
