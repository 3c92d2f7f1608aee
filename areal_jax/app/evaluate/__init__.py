"""A model on its own, measured on a task."""
