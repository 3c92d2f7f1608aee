"""The planner: from devices, model and lengths to the layout and settings of a run, and the limits on its pace."""
