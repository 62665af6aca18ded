"""HTTP/2 and HTTP/1.1: bytes to requests, and answers back; the connections, and their limits."""
