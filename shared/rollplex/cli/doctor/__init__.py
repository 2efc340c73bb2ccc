"""`rollplex doctor`: whether this machine can run Rollplex, as one report that can be passed on.

finding ◄── system, libraries, folder, gpu, outside ──► report      each check is a function that returns findings

No torch is imported, nothing is left behind, nothing waits longer than a few seconds. No secrets, no user name; the
home directory is written as ~.
"""
