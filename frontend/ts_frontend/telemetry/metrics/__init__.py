"""The metrics of a server: recorded, sampled, shown."""
