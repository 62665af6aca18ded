"""How a model's batch size, delay, workers and requests in flight are found that give the most answers a second."""
