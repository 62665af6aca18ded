"""Options and settings of other servers, mapped to this server's."""
