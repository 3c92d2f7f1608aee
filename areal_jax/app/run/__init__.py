"""A run: what every kind has, where its learner is, and the programs of the loop and of supervised training."""
