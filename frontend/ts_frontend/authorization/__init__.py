"""Keys: who may call what."""
