"""Looks before serving: what a server would say about models, and about the machine and settings that it would have."""
