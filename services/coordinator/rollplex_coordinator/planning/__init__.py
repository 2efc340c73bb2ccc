"""`rollplex plan`: what a configuration holds on each device and in each phase, placed in four ways."""
