"""An image classifier: a PNG in, the number of its class out."""

import nets


class Handler:
    def initialize(self, context):
        self.net = nets.Classifier()

    def handle(self, data, context):
        return [str(one) for one in self.net.classes([row.get("body") or row.get("data") for row in data])]
