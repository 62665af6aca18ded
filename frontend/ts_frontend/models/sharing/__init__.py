"""Several servers with the same models: the shared document, its storage, and its synchronization."""
