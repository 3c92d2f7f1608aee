"""The loop's arrows 6 and 7: groups become packed rows, packed rows become the next version of the weights.

groups -> advantages.py -> packing.py -> proximal.py, losses.py (inside train_step.py) -> optimizer.py
learner.py drives them and is all that the controller sees.
"""
