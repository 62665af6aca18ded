# Generated from protos/open_inference.proto by ts_scripts/gen_protos.py: change that file, not this one.

from ts.protocol import pool

DESCRIPTOR = pool.register(
    b'\n\x14open_inference.proto\x12\tinference"\x13\n\x11ServerLiveRequest""\n\x12ServerLiveResp'
    b'onse\x12\x0c\n\x04live\x18\x01 \x01(\x08"\x14\n\x12ServerReadyRequest"$\n\x13ServerReadyResponse\x12\r\n\x05ready'
    b'\x18\x01 \x01(\x08"2\n\x11ModelReadyRequest\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x0f\n\x07version\x18\x02 \x01(\t"#\n\x12ModelReady'
    b'Response\x12\r\n\x05ready\x18\x01 \x01(\x08"\x17\n\x15ServerMetadataRequest"K\n\x16ServerMetadataRespon'
    b'se\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x0f\n\x07version\x18\x02 \x01(\t\x12\x12\n\nextensions\x18\x03 \x03(\t"5\n\x14ModelMetadataRe'
    b'quest\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x0f\n\x07version\x18\x02 \x01(\t"\xb1\x03\n\x15ModelMetadataResponse\x12\x0c\n\x04name\x18\x01'
    b' \x01(\t\x12\x10\n\x08versions\x18\x02 \x03(\t\x12\x10\n\x08platform\x18\x03 \x01(\t\x12?\n\x06inputs\x18\x04 \x03(\x0b2/.inference.Mod'
    b'elMetadataResponse.TensorMetadata\x12@\n\x07outputs\x18\x05 \x03(\x0b2/.inference.ModelMeta'
    b'dataResponse.TensorMetadata\x1a\xe2\x01\n\x0eTensorMetadata\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x10\n\x08datatype'
    b'\x18\x02 \x01(\t\x12\r\n\x05shape\x18\x03 \x03(\x03\x12S\n\nparameters\x18\x04 \x03(\x0b2?.inference.ModelMetadataRespo'
    b'nse.TensorMetadata.ParametersEntry\x1aL\n\x0fParametersEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12(\n\x05va'
    b'lue\x18\x02 \x01(\x0b2\x19.inference.InferParameter:\x028\x01"\x99\x01\n\x0eInferParameter\x12\x14\n\nbool_para'
    b'm\x18\x01 \x01(\x08H\x00\x12\x15\n\x0bint64_param\x18\x02 \x01(\x03H\x00\x12\x16\n\x0cstring_param\x18\x03 \x01(\tH\x00\x12\x16\n\x0cdouble_param'
    b'\x18\x04 \x01(\x01H\x00\x12\x16\n\x0cuint64_param\x18\x05 \x01(\x04H\x00B\x12\n\x10parameter_choice"\xd0\x01\n\x13InferTensorCont'
    b'ents\x12\x15\n\rbool_contents\x18\x01 \x03(\x08\x12\x14\n\x0cint_contents\x18\x02 \x03(\x05\x12\x16\n\x0eint64_contents\x18\x03 \x03('
    b'\x03\x12\x15\n\ruint_contents\x18\x04 \x03(\r\x12\x17\n\x0fuint64_contents\x18\x05 \x03(\x04\x12\x15\n\rfp32_contents\x18\x06 \x03(\x02'
    b'\x12\x15\n\rfp64_contents\x18\x07 \x03(\x01\x12\x16\n\x0ebytes_contents\x18\x08 \x03(\x0c"\xee\x06\n\x11ModelInferRequest\x12\x12\n'
    b'\nmodel_name\x18\x01 \x01(\t\x12\x15\n\rmodel_version\x18\x02 \x01(\t\x12\n\n\x02id\x18\x03 \x01(\t\x12@\n\nparameters\x18\x04 \x03(\x0b'
    b'2,.inference.ModelInferRequest.ParametersEntry\x12=\n\x06inputs\x18\x05 \x03(\x0b2-.inferen'
    b'ce.ModelInferRequest.InferInputTensor\x12H\n\x07outputs\x18\x06 \x03(\x0b27.inference.Model'
    b'InferRequest.InferRequestedOutputTensor\x12\x1a\n\x12raw_input_contents\x18\x07 \x03(\x0c\x1a\x94\x02\n\x10'
    b'InferInputTensor\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x10\n\x08datatype\x18\x02 \x01(\t\x12\r\n\x05shape\x18\x03 \x03(\x03\x12Q\n\nparam'
    b'eters\x18\x04 \x03(\x0b2=.inference.ModelInferRequest.InferInputTensor.ParametersEnt'
    b'ry\x120\n\x08contents\x18\x05 \x01(\x0b2\x1e.inference.InferTensorContents\x1aL\n\x0fParametersEntry\x12'
    b'\x0b\n\x03key\x18\x01 \x01(\t\x12(\n\x05value\x18\x02 \x01(\x0b2\x19.inference.InferParameter:\x028\x01\x1a\xd5\x01\n\x1aInferRequ'
    b'estedOutputTensor\x12\x0c\n\x04name\x18\x01 \x01(\t\x12[\n\nparameters\x18\x02 \x03(\x0b2G.inference.ModelInf'
    b'erRequest.InferRequestedOutputTensor.ParametersEntry\x1aL\n\x0fParametersEntry\x12'
    b'\x0b\n\x03key\x18\x01 \x01(\t\x12(\n\x05value\x18\x02 \x01(\x0b2\x19.inference.InferParameter:\x028\x01\x1aL\n\x0fParameters'
    b'Entry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12(\n\x05value\x18\x02 \x01(\x0b2\x19.inference.InferParameter:\x028\x01"\xd5\x04\n\x12Mod'
    b'elInferResponse\x12\x12\n\nmodel_name\x18\x01 \x01(\t\x12\x15\n\rmodel_version\x18\x02 \x01(\t\x12\n\n\x02id\x18\x03 \x01(\t\x12A'
    b'\n\nparameters\x18\x04 \x03(\x0b2-.inference.ModelInferResponse.ParametersEntry\x12@\n\x07out'
    b'puts\x18\x05 \x03(\x0b2/.inference.ModelInferResponse.InferOutputTensor\x12\x1b\n\x13raw_outpu'
    b't_contents\x18\x06 \x03(\x0c\x1a\x97\x02\n\x11InferOutputTensor\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x10\n\x08datatype\x18\x02 \x01(\t\x12\r'
    b'\n\x05shape\x18\x03 \x03(\x03\x12S\n\nparameters\x18\x04 \x03(\x0b2?.inference.ModelInferResponse.InferOu'
    b'tputTensor.ParametersEntry\x120\n\x08contents\x18\x05 \x01(\x0b2\x1e.inference.InferTensorCont'
    b'ents\x1aL\n\x0fParametersEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12(\n\x05value\x18\x02 \x01(\x0b2\x19.inference.InferPar'
    b'ameter:\x028\x01\x1aL\n\x0fParametersEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12(\n\x05value\x18\x02 \x01(\x0b2\x19.inference.In'
    b'ferParameter:\x028\x01"h\n\x18ModelStreamInferResponse\x12\x15\n\rerror_message\x18\x01 \x01(\t\x125\n\x0ei'
    b'nfer_response\x18\x02 \x01(\x0b2\x1d.inference.ModelInferResponse"\x8a\x01\n\x18ModelRepositoryPa'
    b'rameter\x12\x14\n\nbool_param\x18\x01 \x01(\x08H\x00\x12\x15\n\x0bint64_param\x18\x02 \x01(\x03H\x00\x12\x16\n\x0cstring_param\x18\x03 \x01'
    b'(\tH\x00\x12\x15\n\x0bbytes_param\x18\x04 \x01(\x0cH\x00B\x12\n\x10parameter_choice"@\n\x16RepositoryIndexReques'
    b't\x12\x17\n\x0frepository_name\x18\x01 \x01(\t\x12\r\n\x05ready\x18\x02 \x01(\x08"\xa4\x01\n\x17RepositoryIndexResponse\x12=\n'
    b'\x06models\x18\x01 \x03(\x0b2-.inference.RepositoryIndexResponse.ModelIndex\x1aJ\n\nModelInd'
    b'ex\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x0f\n\x07version\x18\x02 \x01(\t\x12\r\n\x05state\x18\x03 \x01(\t\x12\x0e\n\x06reason\x18\x04 \x01(\t"\xec\x01\n\x1aRep'
    b'ositoryModelLoadRequest\x12\x17\n\x0frepository_name\x18\x01 \x01(\t\x12\x12\n\nmodel_name\x18\x02 \x01(\t\x12I\n\n'
    b'parameters\x18\x03 \x03(\x0b25.inference.RepositoryModelLoadRequest.ParametersEntry\x1a'
    b'V\n\x0fParametersEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x122\n\x05value\x18\x02 \x01(\x0b2#.inference.ModelReposito'
    b'ryParameter:\x028\x01"C\n\x1bRepositoryModelLoadResponse\x12\x12\n\nmodel_name\x18\x01 \x01(\t\x12\x10\n\x08is'
    b'Loaded\x18\x02 \x01(\x08"\xf0\x01\n\x1cRepositoryModelUnloadRequest\x12\x17\n\x0frepository_name\x18\x01 \x01(\t\x12\x12'
    b'\n\nmodel_name\x18\x02 \x01(\t\x12K\n\nparameters\x18\x03 \x03(\x0b27.inference.RepositoryModelUnload'
    b'Request.ParametersEntry\x1aV\n\x0fParametersEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x122\n\x05value\x18\x02 \x01(\x0b2#'
    b'.inference.ModelRepositoryParameter:\x028\x01"G\n\x1dRepositoryModelUnloadResponse'
    b'\x12\x12\n\nmodel_name\x18\x01 \x01(\t\x12\x12\n\nisUnloaded\x18\x02 \x01(\x082\xca\x07\n\x14GRPCInferenceService\x12I\n\nSer'
    b'verLive\x12\x1c.inference.ServerLiveRequest\x1a\x1d.inference.ServerLiveResponse\x12L\n\x0b'
    b'ServerReady\x12\x1d.inference.ServerReadyRequest\x1a\x1e.inference.ServerReadyRespon'
    b'se\x12I\n\nModelReady\x12\x1c.inference.ModelReadyRequest\x1a\x1d.inference.ModelReadyRes'
    b'ponse\x12U\n\x0eServerMetadata\x12 .inference.ServerMetadataRequest\x1a!.inference.Se'
    b'rverMetadataResponse\x12R\n\rModelMetadata\x12\x1f.inference.ModelMetadataRequest\x1a '
    b'.inference.ModelMetadataResponse\x12I\n\nModelInfer\x12\x1c.inference.ModelInferReq'
    b'uest\x1a\x1d.inference.ModelInferResponse\x12Y\n\x10ModelStreamInfer\x12\x1c.inference.Mode'
    b'lInferRequest\x1a#.inference.ModelStreamInferResponse(\x010\x01\x12Q\n\x10ModelInferStre'
    b'am\x12\x1c.inference.ModelInferRequest\x1a\x1d.inference.ModelInferResponse0\x01\x12X\n\x0fRep'
    b'ositoryIndex\x12!.inference.RepositoryIndexRequest\x1a".inference.RepositoryIn'
    b'dexResponse\x12d\n\x13RepositoryModelLoad\x12%.inference.RepositoryModelLoadReques'
    b"t\x1a&.inference.RepositoryModelLoadResponse\x12j\n\x15RepositoryModelUnload\x12'.inf"
    b'erence.RepositoryModelUnloadRequest\x1a(.inference.RepositoryModelUnloadRes'
    b'ponseb\x06proto3'
)

ServerLiveRequest = pool.message_class(DESCRIPTOR, "ServerLiveRequest")
ServerLiveResponse = pool.message_class(DESCRIPTOR, "ServerLiveResponse")
ServerReadyRequest = pool.message_class(DESCRIPTOR, "ServerReadyRequest")
ServerReadyResponse = pool.message_class(DESCRIPTOR, "ServerReadyResponse")
ModelReadyRequest = pool.message_class(DESCRIPTOR, "ModelReadyRequest")
ModelReadyResponse = pool.message_class(DESCRIPTOR, "ModelReadyResponse")
ServerMetadataRequest = pool.message_class(DESCRIPTOR, "ServerMetadataRequest")
ServerMetadataResponse = pool.message_class(DESCRIPTOR, "ServerMetadataResponse")
ModelMetadataRequest = pool.message_class(DESCRIPTOR, "ModelMetadataRequest")
ModelMetadataResponse = pool.message_class(DESCRIPTOR, "ModelMetadataResponse")
InferParameter = pool.message_class(DESCRIPTOR, "InferParameter")
InferTensorContents = pool.message_class(DESCRIPTOR, "InferTensorContents")
ModelInferRequest = pool.message_class(DESCRIPTOR, "ModelInferRequest")
ModelInferResponse = pool.message_class(DESCRIPTOR, "ModelInferResponse")
ModelStreamInferResponse = pool.message_class(DESCRIPTOR, "ModelStreamInferResponse")
ModelRepositoryParameter = pool.message_class(DESCRIPTOR, "ModelRepositoryParameter")
RepositoryIndexRequest = pool.message_class(DESCRIPTOR, "RepositoryIndexRequest")
RepositoryIndexResponse = pool.message_class(DESCRIPTOR, "RepositoryIndexResponse")
RepositoryModelLoadRequest = pool.message_class(DESCRIPTOR, "RepositoryModelLoadRequest")
RepositoryModelLoadResponse = pool.message_class(DESCRIPTOR, "RepositoryModelLoadResponse")
RepositoryModelUnloadRequest = pool.message_class(DESCRIPTOR, "RepositoryModelUnloadRequest")
RepositoryModelUnloadResponse = pool.message_class(DESCRIPTOR, "RepositoryModelUnloadResponse")
