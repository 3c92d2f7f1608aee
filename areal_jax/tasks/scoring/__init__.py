"""Scores answers: from an answer to its reward, in this process or in worker processes."""
