"""Worker processes: started, fed, watched, replaced."""
