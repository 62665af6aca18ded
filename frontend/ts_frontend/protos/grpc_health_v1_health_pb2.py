# Generated from protos/grpc/health/v1/health.proto by ts_scripts/gen_protos.py: change that file, not this one.

from ts.protocol import pool

DESCRIPTOR = pool.register(
    b'\n\x1bgrpc/health/v1/health.proto\x12\x0egrpc.health.v1"%\n\x12HealthCheckRequest\x12\x0f\n\x07s'
    b'ervice\x18\x01 \x01(\t"\xa9\x01\n\x13HealthCheckResponse\x12A\n\x06status\x18\x01 \x01(\x0e21.grpc.health.v1.He'
    b'althCheckResponse.ServingStatus"O\n\rServingStatus\x12\x0b\n\x07UNKNOWN\x10\x00\x12\x0b\n\x07SERVING'
    b'\x10\x01\x12\x0f\n\x0bNOT_SERVING\x10\x02\x12\x13\n\x0fSERVICE_UNKNOWN\x10\x032\xae\x01\n\x06Health\x12P\n\x05Check\x12".grpc.heal'
    b'th.v1.HealthCheckRequest\x1a#.grpc.health.v1.HealthCheckResponse\x12R\n\x05Watch\x12"'
    b'.grpc.health.v1.HealthCheckRequest\x1a#.grpc.health.v1.HealthCheckResponse0'
    b'\x01b\x06proto3'
)

globals().update(pool.names(DESCRIPTOR))
