"""Advantages, log-probs and losses: pure functions of arrays."""
