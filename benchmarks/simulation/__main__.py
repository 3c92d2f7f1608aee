"""python -m benchmarks.simulation: see rows.py."""

from benchmarks.options import run
from benchmarks.simulation.rows import main

if __name__ == '__main__':
    run('simulation', main)
