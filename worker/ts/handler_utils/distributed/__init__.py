"""Models distributed over several processes by other packages."""
