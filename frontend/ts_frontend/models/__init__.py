"""Models: their archives and formats, loading, registration, description, snapshots."""
