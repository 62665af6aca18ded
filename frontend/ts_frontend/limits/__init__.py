"""Limits for each client, and its share of a model's workers: rules, accounts, the fair queue, several servers"""
