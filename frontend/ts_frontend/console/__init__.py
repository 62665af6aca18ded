"""The operator's console: its pages, and their data, sampled while a client reads them."""
