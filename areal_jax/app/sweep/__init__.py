"""Runs the arms of a sweep, each as a separate process, and makes one table of them."""
