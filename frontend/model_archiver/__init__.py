"""The model archiver: what `torch-model-archiver` runs, importable as `model_archiver`."""
