"""Joules of a run: measured where there is a meter, modelled by activity where the watts of a chip are published."""
