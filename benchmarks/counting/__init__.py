"""Counts the instructions of a request, in the frontend and in a worker."""
