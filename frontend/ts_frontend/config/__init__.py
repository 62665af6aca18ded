"""Settings: one table of them, the sources of their values, and the checks across settings."""
