"""Listening addresses: their sockets, certificates and services."""
