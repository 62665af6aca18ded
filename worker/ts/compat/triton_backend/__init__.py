"""The objects of `triton_python_backend_utils`, which a Triton Python model receives and returns."""
