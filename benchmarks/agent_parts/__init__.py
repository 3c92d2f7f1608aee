"""The parts of benchmarks/agents.py: each measures one line of its table."""
