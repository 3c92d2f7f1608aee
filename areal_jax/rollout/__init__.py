"""Generation: pool -> engine -> segments of tokens, each with its policy version."""
