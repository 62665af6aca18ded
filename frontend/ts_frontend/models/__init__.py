"""Models: found, loaded, registered, described, restored."""
