"""What is decided, apart from everything that acts: no sockets, clocks, files, tensors or threads in here.

Events or facts go in, instructions or verdicts come out; each module says which. A contract keeps it so.
"""
