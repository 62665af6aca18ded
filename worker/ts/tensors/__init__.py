"""Tensor requests as a handler gets them, whatever protocol they came by (docs/open-inference.md).

`types` holds what every protocol's request is read into, `grpc_form` and `json_form` read and write the Open Inference
Protocol's two forms, `rows` turns tensors into what TorchServe's handlers get, and their results into tensors.
"""
