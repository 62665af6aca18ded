"""Models that are spread over several processes by other packages."""
