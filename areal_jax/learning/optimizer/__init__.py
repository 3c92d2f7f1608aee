"""The optimizers: turn gradients into new weights."""
