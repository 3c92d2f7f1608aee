"""Given answers to the problems of a task, scored without a model."""
