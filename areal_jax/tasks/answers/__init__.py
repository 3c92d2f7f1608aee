"""Reads the answer of a text and compares it with the gold answer: one module per kind of `task.answer`."""
