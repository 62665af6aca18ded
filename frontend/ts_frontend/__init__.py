"""The server process: ingress, services, models, batching, workers."""
