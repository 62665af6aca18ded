"""Which request goes to which worker, and when."""
