"""Real runs that are killed, stopped, starved of disk and fed damaged files: python -m checks.chaos."""
