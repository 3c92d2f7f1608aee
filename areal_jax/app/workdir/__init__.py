"""The directory of a run, and what it says of runs that are there."""
