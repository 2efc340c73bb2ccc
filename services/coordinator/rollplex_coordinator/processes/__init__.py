"""The line to the workers, the processes behind it, and how a run is asked to end."""
