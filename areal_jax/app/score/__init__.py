"""Scores given answers to the problems of a task, without a model."""
