"""Listening addresses, the engines behind them, and the services on each."""
