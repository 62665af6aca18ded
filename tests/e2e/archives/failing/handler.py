"""A model that can't be loaded."""


class Broken:
    def initialize(self, context):
        raise ValueError("the weights are of another model")

    def handle(self, data, context):
        return data
