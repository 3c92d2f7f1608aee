"""Runs the arms of a sweep, each as a process of its own, and makes one table of them."""
