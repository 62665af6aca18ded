"""The gRPC APIs: the protocol, the services, and what surrounds each call."""
