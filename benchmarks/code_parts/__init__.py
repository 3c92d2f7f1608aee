"""The parts of benchmarks/code_rewards.py: each measures one line of its table."""
