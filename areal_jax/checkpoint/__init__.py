"""Under the whole loop: a run that was killed goes on as if it had not been.

state.py writes the host side down as one JSON value, store.py puts it beside weights and optimizer state in one step
that exists whole or not at all.
"""
