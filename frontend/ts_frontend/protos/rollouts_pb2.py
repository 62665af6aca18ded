# Generated from protos/rollouts.proto by ts_scripts/gen_protos.py: change that file, not this one.

from ts.protocol import pool

DESCRIPTOR = pool.register(
    b'\n\x0erollouts.proto\x12\x13torchrelay.rollouts"F\n\x0eRolloutRequest\x12\x12\n\nmodel_name\x18\x01 '
    b'\x01(\t\x12\x0e\n\x06action\x18\x02 \x01(\t\x12\x10\n\x08settings\x18\x03 \x01(\t"\x1e\n\x0fRolloutResponse\x12\x0b\n\x03msg\x18\x01 \x01(\t2b\n'
    b'\x08Rollouts\x12V\n\x07Rollout\x12#.torchrelay.rollouts.RolloutRequest\x1a$.torchrelay.r'
    b'ollouts.RolloutResponse"\x00b\x06proto3'
)

globals().update(pool.names(DESCRIPTOR))
