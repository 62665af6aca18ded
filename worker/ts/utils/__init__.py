"""Names that handlers import from `ts.utils`."""
