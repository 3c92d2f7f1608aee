"""Packing and update: groups become packed rows, and packed rows become the next version of the weights.

groups -> objective/advantages.py -> packing/ (packing, rows)                                      numpy, on the host
       -> row_layout.py -> passes.py -> programs.py (forward, objective/, optimizer.py)             jax, on the mesh
learner.py has the commands and is the only file that the controller uses; passes.py loops over minibatches and epochs;
trained_part.py joins the programs and passes that train a set of leaves; blockwise.py trains one such set after the
other; diagnostics/ measures what an update did; weights.py has the forms of the weights.

Shapes: M micro-batches of a minibatch, R rows of a micro-batch, T tokens of a row, N loss tokens of a row, S segments,
A answer tokens, B groups per update; of the model d width, H query heads, K key heads, D head size, V vocabulary. The
line that defines an array has its shape in a comment; for arguments and results the docstring has it.
"""
