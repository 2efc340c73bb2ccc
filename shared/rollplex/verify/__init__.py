"""The report of `rollplex verify`: what the coordinator writes, the command line and the demo read. No torch."""
