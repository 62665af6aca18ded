"""`mlserver.cli`: the command `mlserver`."""
