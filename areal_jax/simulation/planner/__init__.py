"""The planner: from devices, model and lengths to the layout and the settings of a run, and what limits it next."""
