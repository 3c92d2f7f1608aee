"""Simulates a run: the production loop with counts for tokens and prices for work."""
