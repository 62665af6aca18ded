"""Workers on other machines, placed by Ray: their resources, the connection to Ray, and the address that they
connect to."""
