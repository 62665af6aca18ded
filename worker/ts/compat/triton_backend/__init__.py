"""What `triton_python_backend_utils` is made of: the objects that a Triton Python model gets and gives."""
