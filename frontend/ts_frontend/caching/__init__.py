"""The cache of answers: keys of requests, answers in each dialect's form, requests that share a run, Redis."""
