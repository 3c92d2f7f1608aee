"""Weights in the forms of learner, engines and files."""
