"""Processes that run code for a run: pipes, deadlines, and an end that always works."""
