"""One router per noun. HTTP only: what a request may do is decided by the core behind `Control`."""
