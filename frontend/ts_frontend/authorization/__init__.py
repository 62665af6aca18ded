"""Keys: the authorization of calls by API."""
