"""Workers on other machines, placed by Ray: their resources, the connection to Ray, and their server's address."""
