"""How processes end: the exit codes of a worker process, the names of signals."""

import signal

ENDED, SCORER_DIED, USAGE, LEFT_BEHIND = range(4)  # LEFT_BEHIND: some process could not be killed

_SIGNALS = {number.value: number.name for number in signal.Signals}


def name_signal(number: int) -> str:
    """'SIGKILL'; 'signal 40' for one of the many without a name."""
    return _SIGNALS.get(number, f'signal {number}')
