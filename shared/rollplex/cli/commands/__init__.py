"""The commands: one module each, a function with typer's annotations that parses and hands over.

A module here imports only what its arguments need; what carries the command out is imported inside the function, so
that `rollplex --help` stays quick.
"""
