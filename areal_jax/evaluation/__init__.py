"""How good a policy version is: held-out problems through the same engines and verifiers as training."""
