"""Tensor requests of handlers, independent of their protocol (docs/open-inference.md).

`types` holds the types that every protocol's requests are read into, `grpc_form` and `json_form` read and write the
Open Inference Protocol's two forms, `rows` turns tensors into the rows of TorchServe's handlers, and their results into
tensors.
"""
