"""The server process: listeners, HTTP and gRPC APIs, scheduling, models, workers."""
