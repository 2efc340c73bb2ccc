"""Whether a program may take the place of a service: it is driven through the protocol as a coordinator would, and held
to docs/protocol.md. Knows no service's code; what it computes itself, it computes with `rollplex.model`."""
