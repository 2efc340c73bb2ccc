"""What every service process runs on: connection, message thread, work loop. No torch."""
