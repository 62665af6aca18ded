"""Imports torch and computes something small while it loads, as most models do."""

import torch


class Handler:
    def initialize(self, context):
        self.weights = torch.ones(64, 64) @ torch.ones(64, 64)

    def handle(self, data, context):
        return [str(float(self.weights[0, 0]))] * len(data)
