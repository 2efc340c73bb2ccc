"""What every service process runs on: connection, message thread, segments, work loop. No torch."""

from rollplex.worker.runtime import Service, report, run
from rollplex.worker.segments import Segments

__all__ = ["Segments", "Service", "report", "run"]
