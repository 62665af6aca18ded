"""What handlers import as `ts.utils`."""
