# Generated from protos/management.proto by ts_scripts/gen_protos.py: change that file, not this one.

from ts_frontend.protos import pool

DESCRIPTOR = pool.register(
    b'\n\x10management.proto\x12!org.pytorch.serve.grpc.management"!\n\x12ManagementRespo'
    b'nse\x12\x0b\n\x03msg\x18\x01 \x01(\t"U\n\x14DescribeModelRequest\x12\x12\n\nmodel_name\x18\x01 \x01(\t\x12\x15\n\rmodel_ve'
    b'rsion\x18\x02 \x01(\t\x12\x12\n\ncustomized\x18\x03 \x01(\x08";\n\x11ListModelsRequest\x12\r\n\x05limit\x18\x01 \x01(\x05\x12\x17\n\x0fn'
    b'ext_page_token\x18\x02 \x01(\x05"\xfb\x01\n\x14RegisterModelRequest\x12\x12\n\nbatch_size\x18\x01 \x01(\x05\x12\x0f\n\x07han'
    b'dler\x18\x02 \x01(\t\x12\x17\n\x0finitial_workers\x18\x03 \x01(\x05\x12\x17\n\x0fmax_batch_delay\x18\x04 \x01(\x05\x12\x12\n\nmodel_na'
    b'me\x18\x05 \x01(\t\x12\x18\n\x10response_timeout\x18\x06 \x01(\x05\x12\x0f\n\x07runtime\x18\x07 \x01(\t\x12\x13\n\x0bsynchronous\x18\x08 \x01(\x08'
    b'\x12\x0b\n\x03url\x18\t \x01(\t\x12\x12\n\ns3_sse_kms\x18\n \x01(\x08\x12\x17\n\x0fstartup_timeout\x18\x0b \x01(\x05"\xa1\x01\n\x12ScaleWork'
    b'erRequest\x12\x12\n\nmodel_name\x18\x01 \x01(\t\x12\x15\n\rmodel_version\x18\x02 \x01(\t\x12\x12\n\nmax_worker\x18\x03 \x01(\x05'
    b'\x12\x12\n\nmin_worker\x18\x04 \x01(\x05\x12\x12\n\nnumber_gpu\x18\x05 \x01(\x05\x12\x13\n\x0bsynchronous\x18\x06 \x01(\x08\x12\x0f\n\x07timeout'
    b'\x18\x07 \x01(\x05">\n\x11SetDefaultRequest\x12\x12\n\nmodel_name\x18\x01 \x01(\t\x12\x15\n\rmodel_version\x18\x02 \x01(\t"C'
    b'\n\x16UnregisterModelRequest\x12\x12\n\nmodel_name\x18\x01 \x01(\t\x12\x15\n\rmodel_version\x18\x02 \x01(\t2\xa0\x06\n\x15'
    b'ManagementAPIsService\x12\x81\x01\n\rDescribeModel\x127.org.pytorch.serve.grpc.managem'
    b'ent.DescribeModelRequest\x1a5.org.pytorch.serve.grpc.management.ManagementR'
    b'esponse"\x00\x12{\n\nListModels\x124.org.pytorch.serve.grpc.management.ListModelsRe'
    b'quest\x1a5.org.pytorch.serve.grpc.management.ManagementResponse"\x00\x12\x81\x01\n\rRegis'
    b'terModel\x127.org.pytorch.serve.grpc.management.RegisterModelRequest\x1a5.org.'
    b'pytorch.serve.grpc.management.ManagementResponse"\x00\x12}\n\x0bScaleWorker\x125.org.'
    b'pytorch.serve.grpc.management.ScaleWorkerRequest\x1a5.org.pytorch.serve.grp'
    b'c.management.ManagementResponse"\x00\x12{\n\nSetDefault\x124.org.pytorch.serve.grpc'
    b'.management.SetDefaultRequest\x1a5.org.pytorch.serve.grpc.management.Manage'
    b'mentResponse"\x00\x12\x85\x01\n\x0fUnregisterModel\x129.org.pytorch.serve.grpc.management.U'
    b'nregisterModelRequest\x1a5.org.pytorch.serve.grpc.management.ManagementResp'
    b'onse"\x00B\x02P\x01b\x06proto3'
)

ManagementResponse = pool.message_class(DESCRIPTOR, "ManagementResponse")
DescribeModelRequest = pool.message_class(DESCRIPTOR, "DescribeModelRequest")
ListModelsRequest = pool.message_class(DESCRIPTOR, "ListModelsRequest")
RegisterModelRequest = pool.message_class(DESCRIPTOR, "RegisterModelRequest")
ScaleWorkerRequest = pool.message_class(DESCRIPTOR, "ScaleWorkerRequest")
SetDefaultRequest = pool.message_class(DESCRIPTOR, "SetDefaultRequest")
UnregisterModelRequest = pool.message_class(DESCRIPTOR, "UnregisterModelRequest")
