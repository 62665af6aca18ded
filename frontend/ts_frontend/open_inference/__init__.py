"""The Open Inference Protocol without its transports: requests, repository, statistics, settings."""
