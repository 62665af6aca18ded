"""Checks before serving: a server's findings about models, the machine and the settings."""
