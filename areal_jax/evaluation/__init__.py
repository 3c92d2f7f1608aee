"""Evaluation of a policy version: held-out problems through the same engines and verifiers as training."""
