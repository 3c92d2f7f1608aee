"""Under arrows 3 and 7: the decoder that both sides run, its log-probs, and weights from files."""
