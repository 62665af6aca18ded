"""Messages of the V2 protocol."""
