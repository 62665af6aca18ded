"""The names that predictors import from `kserve`, for environments without it."""
