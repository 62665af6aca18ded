"""Listening addresses, the engines behind them, and what answers where."""
