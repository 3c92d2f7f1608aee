"""Closed forms that simulated runs are compared with, and from which a search for a plan starts."""
