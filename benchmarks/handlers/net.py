"""A network of nets.py, the one with the model's name."""

import nets


class Handler:
    def initialize(self, context):
        self.answers = nets.NETS[context.manifest["model"]["modelName"]]().answers

    def handle(self, data, context):
        return self.answers([row.get("body") or row.get("data") for row in data])
