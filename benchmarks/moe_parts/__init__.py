"""The parts of benchmarks/moe.py: each measures lines of its table."""
