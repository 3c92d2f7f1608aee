"""Training in blocks: an update trains some of the leaves, and the others are frozen (docs/blockwise.md).

blocks.py         which leaves are a block, and which block an update trains; pure functions, no jax
block_learner.py  the learner that trains one block after the other
"""
