"""The decoder that generates and is trained, its table of weights, its attention backends and its log-probs.

Names of arrays and comments use one legend for shapes: M micro-batches, R rows, T tokens, N loss tokens, S segments,
A answer tokens, B groups; H heads, K kv heads, D head_dim, d model width, V vocabulary.
"""
