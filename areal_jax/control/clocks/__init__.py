"""Time: every wait of the host side goes through a clock (run, wait, call, now)."""
