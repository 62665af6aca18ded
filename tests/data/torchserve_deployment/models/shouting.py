"""Answers a text in capitals, as a class in TorchServe's manner."""

from ts.handler_utils.torch_export.load_util import load_exported_model


class Shouting:
    def initialize(self, context):
        self.manifest = context.manifest
        self.load = load_exported_model
        self.initialized = True

    def handle(self, data, context):
        return [bytes(row.get("data") or row.get("body")).decode().upper() for row in data]
