"""Preprocessing by other packages."""
