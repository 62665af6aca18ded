"""Listening addresses, their certificates, and the services on each."""
