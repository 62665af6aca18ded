"""Options and settings of other servers, mapped to ours."""
