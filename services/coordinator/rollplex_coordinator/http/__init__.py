"""The HTTP control API: FastAPI under uvicorn in a thread of its own; asks the core through `control.Control`."""
