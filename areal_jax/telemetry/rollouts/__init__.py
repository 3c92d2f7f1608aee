"""What a run said: texts, tokens and rewards of some groups of every update, in WORKDIR/rollouts (docs/rollouts.md)."""
