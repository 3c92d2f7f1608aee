"""Measures a model on a task, without training."""
