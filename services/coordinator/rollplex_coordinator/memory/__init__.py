"""Who holds how much: sizes from shapes, the plan that refuses, leases with their segments, the descriptors."""
