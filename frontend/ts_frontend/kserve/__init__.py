"""Starts this server as KServe and aiSSEMBLE start theirs: their options, and programs that make their own server."""
