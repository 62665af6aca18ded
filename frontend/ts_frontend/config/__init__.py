"""Settings: one table, where values come from, and what they must be together."""
