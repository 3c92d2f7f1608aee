"""Runs: the parts that all kinds share, the site of the learner, and the programs of the loop and of SFT."""
