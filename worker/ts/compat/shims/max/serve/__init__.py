"""MAX's servers, for where they aren't installed: `python -m max.serve.grpc_server` (docs/profiles.md)."""
