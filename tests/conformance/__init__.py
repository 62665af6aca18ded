"""The dialects of model servers: what each promises, and whether a running server keeps it."""
