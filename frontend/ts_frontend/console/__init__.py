"""The operator's console: its pages, and their data, sampled while somebody watches."""
