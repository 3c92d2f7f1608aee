"""The exit codes of a worker process."""

ENDED, SCORER_DIED, USAGE, LEFT_BEHIND = range(4)  # LEFT_BEHIND: some process could not be killed
