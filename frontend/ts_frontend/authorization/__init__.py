"""Keys: which caller may call which API."""
