"""Clocks: every wait of the host side goes through one (run, wait, call, now), which orders all completions."""
