# Generated from protos/grpc/reflection/v1alpha/reflection.proto by ts_scripts/gen_protos.py: change that file, not this one.

from ts.protocol import pool

DESCRIPTOR = pool.register(
    b'\n(grpc/reflection/v1alpha/reflection.proto\x12\x17grpc.reflection.v1alpha"\x8a\x02\n\x17'
    b'ServerReflectionRequest\x12\x0c\n\x04host\x18\x01 \x01(\t\x12\x1a\n\x10file_by_filename\x18\x03 \x01(\tH\x00\x12 \n\x16fil'
    b'e_containing_symbol\x18\x04 \x01(\tH\x00\x12N\n\x19file_containing_extension\x18\x05 \x01(\x0b2).grpc.re'
    b"flection.v1alpha.ExtensionRequestH\x00\x12'\n\x1dall_extension_numbers_of_type\x18\x06 \x01"
    b'(\tH\x00\x12\x17\n\rlist_services\x18\x07 \x01(\tH\x00B\x11\n\x0fmessage_request"E\n\x10ExtensionRequest\x12\x17\n\x0f'
    b'containing_type\x18\x01 \x01(\t\x12\x18\n\x10extension_number\x18\x02 \x01(\x05"\xd1\x03\n\x18ServerReflectionResp'
    b'onse\x12\x12\n\nvalid_host\x18\x01 \x01(\t\x12J\n\x10original_request\x18\x02 \x01(\x0b20.grpc.reflection.v1a'
    b'lpha.ServerReflectionRequest\x12S\n\x18file_descriptor_response\x18\x04 \x01(\x0b2/.grpc.re'
    b'flection.v1alpha.FileDescriptorResponseH\x00\x12Z\n\x1eall_extension_numbers_respo'
    b'nse\x18\x05 \x01(\x0b20.grpc.reflection.v1alpha.ExtensionNumberResponseH\x00\x12N\n\x16list_se'
    b'rvices_response\x18\x06 \x01(\x0b2,.grpc.reflection.v1alpha.ListServiceResponseH\x00\x12@\n'
    b'\x0eerror_response\x18\x07 \x01(\x0b2&.grpc.reflection.v1alpha.ErrorResponseH\x00B\x12\n\x10messa'
    b'ge_response"7\n\x16FileDescriptorResponse\x12\x1d\n\x15file_descriptor_proto\x18\x01 \x03(\x0c"K\n\x17'
    b'ExtensionNumberResponse\x12\x16\n\x0ebase_type_name\x18\x01 \x01(\t\x12\x18\n\x10extension_number\x18\x02 \x03('
    b'\x05"P\n\x13ListServiceResponse\x129\n\x07service\x18\x01 \x03(\x0b2(.grpc.reflection.v1alpha.Serv'
    b'iceResponse"\x1f\n\x0fServiceResponse\x12\x0c\n\x04name\x18\x01 \x01(\t":\n\rErrorResponse\x12\x12\n\nerror_c'
    b'ode\x18\x01 \x01(\x05\x12\x15\n\rerror_message\x18\x02 \x01(\t2\x93\x01\n\x10ServerReflection\x12\x7f\n\x14ServerReflectio'
    b'nInfo\x120.grpc.reflection.v1alpha.ServerReflectionRequest\x1a1.grpc.reflectio'
    b'n.v1alpha.ServerReflectionResponse(\x010\x01b\x06proto3'
)

globals().update(pool.names(DESCRIPTOR))
