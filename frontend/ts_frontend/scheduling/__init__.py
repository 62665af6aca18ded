"""The order of requests: queues, batches, sequences, streams, and the worker that each goes to."""
