"""Weights in the forms that learner, engines and files use."""
