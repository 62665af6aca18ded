"""What the subcommands for a running server are made of: a gRPC client, tables, and waiting for workers."""
