"""The HTTP APIs: requests to calls, answers and errors back."""
