"""Gradients become new weights."""
