"""Language models: their handlers, and the engine of ours for those of the package transformers."""
