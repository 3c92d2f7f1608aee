"""Manages the directory of a run, and lists the runs below a directory."""
