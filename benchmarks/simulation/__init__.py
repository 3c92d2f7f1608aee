"""Published rows, and the constants with which they are simulated."""
