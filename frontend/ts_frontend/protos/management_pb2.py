# Generated from protos/management.proto by ts_scripts/gen_protos.py: change that file, not this one.

from ts.protocol import pool

DESCRIPTOR = pool.register(
    b'\n\x10management.proto\x12!org.pytorch.serve.grpc.management"!\n\x12ManagementRespo'
    b'nse\x12\x0b\n\x03msg\x18\x01 \x01(\t"U\n\x14DescribeModelRequest\x12\x12\n\nmodel_name\x18\x01 \x01(\t\x12\x15\n\rmodel_ve'
    b'rsion\x18\x02 \x01(\t\x12\x12\n\ncustomized\x18\x03 \x01(\x08";\n\x11ListModelsRequest\x12\r\n\x05limit\x18\x01 \x01(\x05\x12\x17\n\x0fn'
    b'ext_page_token\x18\x02 \x01(\x05"\xfb\x01\n\x14RegisterModelRequest\x12\x12\n\nbatch_size\x18\x01 \x01(\x05\x12\x0f\n\x07han'
    b'dler\x18\x02 \x01(\t\x12\x17\n\x0finitial_workers\x18\x03 \x01(\x05\x12\x17\n\x0fmax_batch_delay\x18\x04 \x01(\x05\x12\x12\n\nmodel_na'
    b'me\x18\x05 \x01(\t\x12\x18\n\x10response_timeout\x18\x06 \x01(\x05\x12\x0f\n\x07runtime\x18\x07 \x01(\t\x12\x13\n\x0bsynchronous\x18\x08 \x01(\x08'
    b'\x12\x0b\n\x03url\x18\t \x01(\t\x12\x12\n\ns3_sse_kms\x18\n \x01(\x08\x12\x17\n\x0fstartup_timeout\x18\x0b \x01(\x05"\xc6\x01\n\x12ScaleWork'
    b'erRequest\x12\x12\n\nmodel_name\x18\x01 \x01(\t\x12\x15\n\rmodel_version\x18\x02 \x01(\t\x12\x12\n\nmax_worker\x18\x03 \x01(\x05'
    b'\x12\x17\n\nmin_worker\x18\x04 \x01(\x05H\x00\x88\x01\x01\x12\x12\n\nnumber_gpu\x18\x05 \x01(\x05\x12\x13\n\x0bsynchronous\x18\x06 \x01(\x08\x12\x14\n\x07ti'
    b'meout\x18\x07 \x01(\x05H\x01\x88\x01\x01B\r\n\x0b_min_workerB\n\n\x08_timeout">\n\x11SetDefaultRequest\x12\x12\n\nmode'
    b'l_name\x18\x01 \x01(\t\x12\x15\n\rmodel_version\x18\x02 \x01(\t"C\n\x16UnregisterModelRequest\x12\x12\n\nmodel_n'
    b'ame\x18\x01 \x01(\t\x12\x15\n\rmodel_version\x18\x02 \x01(\t2\xa0\x06\n\x15ManagementAPIsService\x12\x81\x01\n\rDescribeM'
    b'odel\x127.org.pytorch.serve.grpc.management.DescribeModelRequest\x1a5.org.pyto'
    b'rch.serve.grpc.management.ManagementResponse"\x00\x12{\n\nListModels\x124.org.pytor'
    b'ch.serve.grpc.management.ListModelsRequest\x1a5.org.pytorch.serve.grpc.mana'
    b'gement.ManagementResponse"\x00\x12\x81\x01\n\rRegisterModel\x127.org.pytorch.serve.grpc.m'
    b'anagement.RegisterModelRequest\x1a5.org.pytorch.serve.grpc.management.Manag'
    b'ementResponse"\x00\x12}\n\x0bScaleWorker\x125.org.pytorch.serve.grpc.management.Scale'
    b'WorkerRequest\x1a5.org.pytorch.serve.grpc.management.ManagementResponse"\x00\x12{'
    b'\n\nSetDefault\x124.org.pytorch.serve.grpc.management.SetDefaultRequest\x1a5.org'
    b'.pytorch.serve.grpc.management.ManagementResponse"\x00\x12\x85\x01\n\x0fUnregisterModel\x12'
    b'9.org.pytorch.serve.grpc.management.UnregisterModelRequest\x1a5.org.pytorch'
    b'.serve.grpc.management.ManagementResponse"\x00B\x02P\x01b\x06proto3'
)

globals().update(pool.names(DESCRIPTOR))
