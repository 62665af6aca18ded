"""Options and settings of other servers, and which of our settings each one is."""
