"""BaseHandler subclass without weights: identity; describe_handle returns metadata."""

from ts.torch_handler.base_handler import BaseHandler


class DescribeHandler(BaseHandler):
    def initialize(self, context):
        self.context = context
        self.manifest = context.manifest
        self.initialized = True

    def preprocess(self, data):
        return [r.get("data") or r.get("body") for r in data]

    def inference(self, data):
        return data

    def postprocess(self, data):
        return [d.decode() if isinstance(d, (bytes, bytearray)) else d for d in data]

    def explain_handle(self, data_preprocess, raw_data):
        return [{"explained": len(raw_data)}]

    def describe_handle(self):
        return {"labels": ["a", "b"], "n": 2}
