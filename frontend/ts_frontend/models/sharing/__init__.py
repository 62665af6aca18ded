"""Several servers with the same models: the document that they share, where it lies, and what follows from it."""
