"""The parts of `python -m benchmarks.gpu`. Each is a process of its own: it can be ended, and its memory is freed."""
