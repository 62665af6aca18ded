# Generated from protos/rollouts.proto by ts_scripts/gen_protos.py: change that file, not this one.

from ts_frontend.protos import rollouts_pb2
from ts.protocol.pool import serialize


class RolloutsStub:
    Rollout_PATH = "/torchrelay.rollouts.Rollouts/Rollout"

    def __init__(self, channel):
        self.Rollout = channel.unary_unary(
            self.Rollout_PATH,
            request_serializer=serialize,
            response_deserializer=rollouts_pb2.RolloutResponse.FromString,
        )
