"""Writes the weights of a run as files for other programs."""
