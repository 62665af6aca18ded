"""Worker processes: their start, requests, supervision and replacement."""
