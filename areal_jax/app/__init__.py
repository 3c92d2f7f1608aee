"""Builds a run from a config and drives it: the only place that imports both rollout and learning."""
