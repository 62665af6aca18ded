"""The search for the batch size, delay, workers and requests in flight that give a model the most answers a second."""
