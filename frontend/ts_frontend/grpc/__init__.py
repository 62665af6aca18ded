"""The gRPC APIs: the protocol, the services, and the keys, traces and metrics of each call."""
