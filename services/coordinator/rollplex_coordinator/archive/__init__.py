"""What runs have left behind, for the dashboard: read-only, bounded, and by names that were listed, never by a path."""
