"""A model that never finishes loading."""

import threading


class Slow:
    def initialize(self, context):
        threading.Event().wait()

    def handle(self, data, context):
        return data
