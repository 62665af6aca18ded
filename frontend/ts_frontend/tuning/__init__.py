"""The search for the batch size, delay, workers and requests in flight with the most answers a second."""
