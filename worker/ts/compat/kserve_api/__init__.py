"""The names that predictors import of `kserve`, for where that isn't installed."""
