"""Attention over packed rows for the learner: the backends, how one is chosen, and its check at start-up."""
