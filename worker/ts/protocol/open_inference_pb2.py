# Generated from protos/open_inference.proto by ts_scripts/gen_protos.py: change that file, not this one.

from ts.protocol import pool
from ts.protocol import model_config_pb2

DESCRIPTOR = pool.register(
    b'\n\x14open_inference.proto\x12\tinference\x1a\x12model_config.proto"\x13\n\x11ServerLiveReque'
    b'st""\n\x12ServerLiveResponse\x12\x0c\n\x04live\x18\x01 \x01(\x08"\x14\n\x12ServerReadyRequest"$\n\x13ServerRe'
    b'adyResponse\x12\r\n\x05ready\x18\x01 \x01(\x08"2\n\x11ModelReadyRequest\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x0f\n\x07version'
    b'\x18\x02 \x01(\t"#\n\x12ModelReadyResponse\x12\r\n\x05ready\x18\x01 \x01(\x08"\x17\n\x15ServerMetadataRequest"K\n\x16'
    b'ServerMetadataResponse\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x0f\n\x07version\x18\x02 \x01(\t\x12\x12\n\nextensions\x18\x03 \x03('
    b'\t"5\n\x14ModelMetadataRequest\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x0f\n\x07version\x18\x02 \x01(\t"\xb1\x03\n\x15ModelMetada'
    b'taResponse\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x10\n\x08versions\x18\x02 \x03(\t\x12\x10\n\x08platform\x18\x03 \x01(\t\x12?\n\x06inputs\x18\x04'
    b' \x03(\x0b2/.inference.ModelMetadataResponse.TensorMetadata\x12@\n\x07outputs\x18\x05 \x03(\x0b2/'
    b'.inference.ModelMetadataResponse.TensorMetadata\x1a\xe2\x01\n\x0eTensorMetadata\x12\x0c\n\x04na'
    b'me\x18\x01 \x01(\t\x12\x10\n\x08datatype\x18\x02 \x01(\t\x12\r\n\x05shape\x18\x03 \x03(\x03\x12S\n\nparameters\x18\x04 \x03(\x0b2?.inferenc'
    b'e.ModelMetadataResponse.TensorMetadata.ParametersEntry\x1aL\n\x0fParametersEntr'
    b'y\x12\x0b\n\x03key\x18\x01 \x01(\t\x12(\n\x05value\x18\x02 \x01(\x0b2\x19.inference.InferParameter:\x028\x01"\x99\x01\n\x0eInferPa'
    b'rameter\x12\x14\n\nbool_param\x18\x01 \x01(\x08H\x00\x12\x15\n\x0bint64_param\x18\x02 \x01(\x03H\x00\x12\x16\n\x0cstring_param\x18\x03 \x01'
    b'(\tH\x00\x12\x16\n\x0cdouble_param\x18\x04 \x01(\x01H\x00\x12\x16\n\x0cuint64_param\x18\x05 \x01(\x04H\x00B\x12\n\x10parameter_choice'
    b'"\xd0\x01\n\x13InferTensorContents\x12\x15\n\rbool_contents\x18\x01 \x03(\x08\x12\x14\n\x0cint_contents\x18\x02 \x03(\x05\x12\x16\n'
    b'\x0eint64_contents\x18\x03 \x03(\x03\x12\x15\n\ruint_contents\x18\x04 \x03(\r\x12\x17\n\x0fuint64_contents\x18\x05 \x03(\x04\x12\x15\n'
    b'\rfp32_contents\x18\x06 \x03(\x02\x12\x15\n\rfp64_contents\x18\x07 \x03(\x01\x12\x16\n\x0ebytes_contents\x18\x08 \x03(\x0c"\xee\x06\n\x11'
    b'ModelInferRequest\x12\x12\n\nmodel_name\x18\x01 \x01(\t\x12\x15\n\rmodel_version\x18\x02 \x01(\t\x12\n\n\x02id\x18\x03 \x01(\t'
    b'\x12@\n\nparameters\x18\x04 \x03(\x0b2,.inference.ModelInferRequest.ParametersEntry\x12=\n\x06in'
    b'puts\x18\x05 \x03(\x0b2-.inference.ModelInferRequest.InferInputTensor\x12H\n\x07outputs\x18\x06 \x03'
    b'(\x0b27.inference.ModelInferRequest.InferRequestedOutputTensor\x12\x1a\n\x12raw_input'
    b'_contents\x18\x07 \x03(\x0c\x1a\x94\x02\n\x10InferInputTensor\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x10\n\x08datatype\x18\x02 \x01(\t\x12\r\n\x05'
    b'shape\x18\x03 \x03(\x03\x12Q\n\nparameters\x18\x04 \x03(\x0b2=.inference.ModelInferRequest.InferInput'
    b'Tensor.ParametersEntry\x120\n\x08contents\x18\x05 \x01(\x0b2\x1e.inference.InferTensorContents'
    b'\x1aL\n\x0fParametersEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12(\n\x05value\x18\x02 \x01(\x0b2\x19.inference.InferParamet'
    b'er:\x028\x01\x1a\xd5\x01\n\x1aInferRequestedOutputTensor\x12\x0c\n\x04name\x18\x01 \x01(\t\x12[\n\nparameters\x18\x02 \x03(\x0b2'
    b'G.inference.ModelInferRequest.InferRequestedOutputTensor.ParametersEntry'
    b'\x1aL\n\x0fParametersEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12(\n\x05value\x18\x02 \x01(\x0b2\x19.inference.InferParamet'
    b'er:\x028\x01\x1aL\n\x0fParametersEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12(\n\x05value\x18\x02 \x01(\x0b2\x19.inference.InferP'
    b'arameter:\x028\x01"\xd5\x04\n\x12ModelInferResponse\x12\x12\n\nmodel_name\x18\x01 \x01(\t\x12\x15\n\rmodel_version'
    b'\x18\x02 \x01(\t\x12\n\n\x02id\x18\x03 \x01(\t\x12A\n\nparameters\x18\x04 \x03(\x0b2-.inference.ModelInferResponse.Pa'
    b'rametersEntry\x12@\n\x07outputs\x18\x05 \x03(\x0b2/.inference.ModelInferResponse.InferOutpu'
    b'tTensor\x12\x1b\n\x13raw_output_contents\x18\x06 \x03(\x0c\x1a\x97\x02\n\x11InferOutputTensor\x12\x0c\n\x04name\x18\x01 \x01(\t'
    b'\x12\x10\n\x08datatype\x18\x02 \x01(\t\x12\r\n\x05shape\x18\x03 \x03(\x03\x12S\n\nparameters\x18\x04 \x03(\x0b2?.inference.ModelI'
    b'nferResponse.InferOutputTensor.ParametersEntry\x120\n\x08contents\x18\x05 \x01(\x0b2\x1e.infer'
    b'ence.InferTensorContents\x1aL\n\x0fParametersEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12(\n\x05value\x18\x02 \x01(\x0b2'
    b'\x19.inference.InferParameter:\x028\x01\x1aL\n\x0fParametersEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12(\n\x05value\x18'
    b'\x02 \x01(\x0b2\x19.inference.InferParameter:\x028\x01"h\n\x18ModelStreamInferResponse\x12\x15\n\rerro'
    b'r_message\x18\x01 \x01(\t\x125\n\x0einfer_response\x18\x02 \x01(\x0b2\x1d.inference.ModelInferResponse"\x8a'
    b'\x01\n\x18ModelRepositoryParameter\x12\x14\n\nbool_param\x18\x01 \x01(\x08H\x00\x12\x15\n\x0bint64_param\x18\x02 \x01(\x03H\x00'
    b'\x12\x16\n\x0cstring_param\x18\x03 \x01(\tH\x00\x12\x15\n\x0bbytes_param\x18\x04 \x01(\x0cH\x00B\x12\n\x10parameter_choice"@\n\x16R'
    b'epositoryIndexRequest\x12\x17\n\x0frepository_name\x18\x01 \x01(\t\x12\r\n\x05ready\x18\x02 \x01(\x08"\xa4\x01\n\x17Reposi'
    b'toryIndexResponse\x12=\n\x06models\x18\x01 \x03(\x0b2-.inference.RepositoryIndexResponse.Mo'
    b'delIndex\x1aJ\n\nModelIndex\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x0f\n\x07version\x18\x02 \x01(\t\x12\r\n\x05state\x18\x03 \x01(\t\x12\x0e\n\x06'
    b'reason\x18\x04 \x01(\t"\xec\x01\n\x1aRepositoryModelLoadRequest\x12\x17\n\x0frepository_name\x18\x01 \x01(\t\x12\x12\n\n'
    b'model_name\x18\x02 \x01(\t\x12I\n\nparameters\x18\x03 \x03(\x0b25.inference.RepositoryModelLoadRequ'
    b'est.ParametersEntry\x1aV\n\x0fParametersEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x122\n\x05value\x18\x02 \x01(\x0b2#.inf'
    b'erence.ModelRepositoryParameter:\x028\x01"C\n\x1bRepositoryModelLoadResponse\x12\x12\n\nmo'
    b'del_name\x18\x01 \x01(\t\x12\x10\n\x08isLoaded\x18\x02 \x01(\x08"\xf0\x01\n\x1cRepositoryModelUnloadRequest\x12\x17\n\x0frep'
    b'ository_name\x18\x01 \x01(\t\x12\x12\n\nmodel_name\x18\x02 \x01(\t\x12K\n\nparameters\x18\x03 \x03(\x0b27.inference.R'
    b'epositoryModelUnloadRequest.ParametersEntry\x1aV\n\x0fParametersEntry\x12\x0b\n\x03key\x18\x01 '
    b'\x01(\t\x122\n\x05value\x18\x02 \x01(\x0b2#.inference.ModelRepositoryParameter:\x028\x01"G\n\x1dRepositor'
    b'yModelUnloadResponse\x12\x12\n\nmodel_name\x18\x01 \x01(\t\x12\x12\n\nisUnloaded\x18\x02 \x01(\x08"3\n\x12ModelCon'
    b'figRequest\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x0f\n\x07version\x18\x02 \x01(\t"=\n\x13ModelConfigResponse\x12&\n\x06conf'
    b'ig\x18\x01 \x01(\x0b2\x16.inference.ModelConfig"7\n\x16ModelStatisticsRequest\x12\x0c\n\x04name\x18\x01 \x01(\t'
    b'\x12\x0f\n\x07version\x18\x02 \x01(\t"J\n\x17ModelStatisticsResponse\x12/\n\x0bmodel_stats\x18\x01 \x03(\x0b2\x1a.infe'
    b'rence.ModelStatistics".\n\x11StatisticDuration\x12\r\n\x05count\x18\x01 \x01(\x04\x12\n\n\x02ns\x18\x02 \x01(\x04"\x9c\x03'
    b'\n\x0fInferStatistics\x12-\n\x07success\x18\x01 \x01(\x0b2\x1c.inference.StatisticDuration\x12*\n\x04fail'
    b'\x18\x02 \x01(\x0b2\x1c.inference.StatisticDuration\x12+\n\x05queue\x18\x03 \x01(\x0b2\x1c.inference.Statisti'
    b'cDuration\x123\n\rcompute_input\x18\x04 \x01(\x0b2\x1c.inference.StatisticDuration\x123\n\rcomput'
    b'e_infer\x18\x05 \x01(\x0b2\x1c.inference.StatisticDuration\x124\n\x0ecompute_output\x18\x06 \x01(\x0b2\x1c.in'
    b'ference.StatisticDuration\x12/\n\tcache_hit\x18\x07 \x01(\x0b2\x1c.inference.StatisticDurati'
    b'on\x120\n\ncache_miss\x18\x08 \x01(\x0b2\x1c.inference.StatisticDuration"\xc3\x02\n\x17InferResponseSt'
    b'atistics\x123\n\rcompute_infer\x18\x01 \x01(\x0b2\x1c.inference.StatisticDuration\x124\n\x0ecompute'
    b'_output\x18\x02 \x01(\x0b2\x1c.inference.StatisticDuration\x12-\n\x07success\x18\x03 \x01(\x0b2\x1c.inference'
    b'.StatisticDuration\x12*\n\x04fail\x18\x04 \x01(\x0b2\x1c.inference.StatisticDuration\x124\n\x0eempty_'
    b'response\x18\x05 \x01(\x0b2\x1c.inference.StatisticDuration\x12,\n\x06cancel\x18\x06 \x01(\x0b2\x1c.inference'
    b'.StatisticDuration"\xca\x01\n\x14InferBatchStatistics\x12\x12\n\nbatch_size\x18\x01 \x01(\x04\x123\n\rcompu'
    b'te_input\x18\x02 \x01(\x0b2\x1c.inference.StatisticDuration\x123\n\rcompute_infer\x18\x03 \x01(\x0b2\x1c.in'
    b'ference.StatisticDuration\x124\n\x0ecompute_output\x18\x04 \x01(\x0b2\x1c.inference.StatisticD'
    b'uration":\n\x0bMemoryUsage\x12\x0c\n\x04type\x18\x01 \x01(\t\x12\n\n\x02id\x18\x02 \x01(\x03\x12\x11\n\tbyte_size\x18\x03 \x01(\x04"\xb4\x03\n\x0f'
    b'ModelStatistics\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x0f\n\x07version\x18\x02 \x01(\t\x12\x16\n\x0elast_inference\x18\x03 \x01(\x04\x12\x17'
    b'\n\x0finference_count\x18\x04 \x01(\x04\x12\x17\n\x0fexecution_count\x18\x05 \x01(\x04\x123\n\x0finference_stats\x18\x06 \x01('
    b'\x0b2\x1a.inference.InferStatistics\x124\n\x0bbatch_stats\x18\x07 \x03(\x0b2\x1f.inference.InferBatc'
    b'hStatistics\x12,\n\x0cmemory_usage\x18\x08 \x03(\x0b2\x16.inference.MemoryUsage\x12E\n\x0eresponse_st'
    b'ats\x18\t \x03(\x0b2-.inference.ModelStatistics.ResponseStatsEntry\x1aX\n\x12ResponseStat'
    b'sEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x121\n\x05value\x18\x02 \x01(\x0b2".inference.InferResponseStatistics:\x02'
    b'8\x01"/\n\x1fSystemSharedMemoryStatusRequest\x12\x0c\n\x04name\x18\x01 \x01(\t"\xa5\x02\n SystemSharedMemo'
    b'ryStatusResponse\x12I\n\x07regions\x18\x01 \x03(\x0b28.inference.SystemSharedMemoryStatusRe'
    b'sponse.RegionsEntry\x1aL\n\x0cRegionStatus\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x0b\n\x03key\x18\x02 \x01(\t\x12\x0e\n\x06offset'
    b'\x18\x03 \x01(\x04\x12\x11\n\tbyte_size\x18\x04 \x01(\x04\x1ah\n\x0cRegionsEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12G\n\x05value\x18\x02 \x01(\x0b28.'
    b'inference.SystemSharedMemoryStatusResponse.RegionStatus:\x028\x01"a\n!SystemSha'
    b'redMemoryRegisterRequest\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x0b\n\x03key\x18\x02 \x01(\t\x12\x0e\n\x06offset\x18\x03 \x01(\x04\x12\x11\n\tb'
    b'yte_size\x18\x04 \x01(\x04"$\n"SystemSharedMemoryRegisterResponse"3\n#SystemSharedMemo'
    b'ryUnregisterRequest\x12\x0c\n\x04name\x18\x01 \x01(\t"&\n$SystemSharedMemoryUnregisterRespons'
    b'e"-\n\x1dCudaSharedMemoryStatusRequest\x12\x0c\n\x04name\x18\x01 \x01(\t"\x95\x02\n\x1eCudaSharedMemorySta'
    b'tusResponse\x12G\n\x07regions\x18\x01 \x03(\x0b26.inference.CudaSharedMemoryStatusResponse.'
    b'RegionsEntry\x1aB\n\x0cRegionStatus\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x11\n\tdevice_id\x18\x02 \x01(\x04\x12\x11\n\tbyte_si'
    b'ze\x18\x03 \x01(\x04\x1af\n\x0cRegionsEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12E\n\x05value\x18\x02 \x01(\x0b26.inference.CudaSha'
    b'redMemoryStatusResponse.RegionStatus:\x028\x01"i\n\x1fCudaSharedMemoryRegisterRequ'
    b'est\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x12\n\nraw_handle\x18\x02 \x01(\x0c\x12\x11\n\tdevice_id\x18\x03 \x01(\x03\x12\x11\n\tbyte_size\x18\x04 '
    b'\x01(\x04""\n CudaSharedMemoryRegisterResponse"1\n!CudaSharedMemoryUnregisterReq'
    b'uest\x12\x0c\n\x04name\x18\x01 \x01(\t"$\n"CudaSharedMemoryUnregisterResponse"\xe6\x01\n\x13TraceSettin'
    b'gRequest\x12>\n\x08settings\x18\x01 \x03(\x0b2,.inference.TraceSettingRequest.SettingsEntry'
    b'\x12\x12\n\nmodel_name\x18\x02 \x01(\t\x1a\x1d\n\x0cSettingValue\x12\r\n\x05value\x18\x01 \x03(\t\x1a\\\n\rSettingsEntry\x12\x0b\n\x03'
    b'key\x18\x01 \x01(\t\x12:\n\x05value\x18\x02 \x01(\x0b2+.inference.TraceSettingRequest.SettingValue:\x028'
    b'\x01"\xd5\x01\n\x14TraceSettingResponse\x12?\n\x08settings\x18\x01 \x03(\x0b2-.inference.TraceSettingRes'
    b'ponse.SettingsEntry\x1a\x1d\n\x0cSettingValue\x12\r\n\x05value\x18\x01 \x03(\t\x1a]\n\rSettingsEntry\x12\x0b\n\x03k'
    b'ey\x18\x01 \x01(\t\x12;\n\x05value\x18\x02 \x01(\x0b2,.inference.TraceSettingResponse.SettingValue:\x028'
    b'\x01"\x9a\x02\n\x12LogSettingsRequest\x12=\n\x08settings\x18\x01 \x03(\x0b2+.inference.LogSettingsReques'
    b't.SettingsEntry\x1ah\n\x0cSettingValue\x12\x14\n\nbool_param\x18\x01 \x01(\x08H\x00\x12\x16\n\x0cuint32_param\x18\x02 '
    b'\x01(\rH\x00\x12\x16\n\x0cstring_param\x18\x03 \x01(\tH\x00B\x12\n\x10parameter_choice\x1a[\n\rSettingsEntry\x12\x0b\n\x03ke'
    b'y\x18\x01 \x01(\t\x129\n\x05value\x18\x02 \x01(\x0b2*.inference.LogSettingsRequest.SettingValue:\x028\x01"\x9d'
    b'\x02\n\x13LogSettingsResponse\x12>\n\x08settings\x18\x01 \x03(\x0b2,.inference.LogSettingsResponse'
    b'.SettingsEntry\x1ah\n\x0cSettingValue\x12\x14\n\nbool_param\x18\x01 \x01(\x08H\x00\x12\x16\n\x0cuint32_param\x18\x02 \x01'
    b'(\rH\x00\x12\x16\n\x0cstring_param\x18\x03 \x01(\tH\x00B\x12\n\x10parameter_choice\x1a\\\n\rSettingsEntry\x12\x0b\n\x03key'
    b'\x18\x01 \x01(\t\x12:\n\x05value\x18\x02 \x01(\x0b2+.inference.LogSettingsResponse.SettingValue:\x028\x012\xe1'
    b'\x0f\n\x14GRPCInferenceService\x12I\n\nServerLive\x12\x1c.inference.ServerLiveRequest\x1a\x1d.in'
    b'ference.ServerLiveResponse\x12L\n\x0bServerReady\x12\x1d.inference.ServerReadyRequest'
    b'\x1a\x1e.inference.ServerReadyResponse\x12I\n\nModelReady\x12\x1c.inference.ModelReadyReq'
    b'uest\x1a\x1d.inference.ModelReadyResponse\x12U\n\x0eServerMetadata\x12 .inference.Server'
    b'MetadataRequest\x1a!.inference.ServerMetadataResponse\x12R\n\rModelMetadata\x12\x1f.in'
    b'ference.ModelMetadataRequest\x1a .inference.ModelMetadataResponse\x12L\n\x0bModelC'
    b'onfig\x12\x1d.inference.ModelConfigRequest\x1a\x1e.inference.ModelConfigResponse\x12X\n\x0f'
    b'ModelStatistics\x12!.inference.ModelStatisticsRequest\x1a".inference.ModelStat'
    b'isticsResponse\x12I\n\nModelInfer\x12\x1c.inference.ModelInferRequest\x1a\x1d.inference.M'
    b'odelInferResponse\x12Y\n\x10ModelStreamInfer\x12\x1c.inference.ModelInferRequest\x1a#.in'
    b'ference.ModelStreamInferResponse(\x010\x01\x12Q\n\x10ModelInferStream\x12\x1c.inference.Mod'
    b'elInferRequest\x1a\x1d.inference.ModelInferResponse0\x01\x12X\n\x0fRepositoryIndex\x12!.inf'
    b'erence.RepositoryIndexRequest\x1a".inference.RepositoryIndexResponse\x12d\n\x13Rep'
    b'ositoryModelLoad\x12%.inference.RepositoryModelLoadRequest\x1a&.inference.Repo'
    b"sitoryModelLoadResponse\x12j\n\x15RepositoryModelUnload\x12'.inference.RepositoryM"
    b'odelUnloadRequest\x1a(.inference.RepositoryModelUnloadResponse\x12s\n\x18SystemSha'
    b'redMemoryStatus\x12*.inference.SystemSharedMemoryStatusRequest\x1a+.inference.'
    b'SystemSharedMemoryStatusResponse\x12y\n\x1aSystemSharedMemoryRegister\x12,.inferen'
    b'ce.SystemSharedMemoryRegisterRequest\x1a-.inference.SystemSharedMemoryRegis'
    b'terResponse\x12\x7f\n\x1cSystemSharedMemoryUnregister\x12..inference.SystemSharedMemo'
    b'ryUnregisterRequest\x1a/.inference.SystemSharedMemoryUnregisterResponse\x12m\n\x16'
    b'CudaSharedMemoryStatus\x12(.inference.CudaSharedMemoryStatusRequest\x1a).infer'
    b'ence.CudaSharedMemoryStatusResponse\x12s\n\x18CudaSharedMemoryRegister\x12*.infere'
    b'nce.CudaSharedMemoryRegisterRequest\x1a+.inference.CudaSharedMemoryRegister'
    b'Response\x12y\n\x1aCudaSharedMemoryUnregister\x12,.inference.CudaSharedMemoryUnreg'
    b'isterRequest\x1a-.inference.CudaSharedMemoryUnregisterResponse\x12O\n\x0cTraceSett'
    b'ing\x12\x1e.inference.TraceSettingRequest\x1a\x1f.inference.TraceSettingResponse\x12L\n\x0b'
    b'LogSettings\x12\x1d.inference.LogSettingsRequest\x1a\x1e.inference.LogSettingsRespon'
    b'seb\x06proto3'
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
ModelConfigRequest = pool.message_class(DESCRIPTOR, "ModelConfigRequest")
ModelConfigResponse = pool.message_class(DESCRIPTOR, "ModelConfigResponse")
ModelStatisticsRequest = pool.message_class(DESCRIPTOR, "ModelStatisticsRequest")
ModelStatisticsResponse = pool.message_class(DESCRIPTOR, "ModelStatisticsResponse")
StatisticDuration = pool.message_class(DESCRIPTOR, "StatisticDuration")
InferStatistics = pool.message_class(DESCRIPTOR, "InferStatistics")
InferResponseStatistics = pool.message_class(DESCRIPTOR, "InferResponseStatistics")
InferBatchStatistics = pool.message_class(DESCRIPTOR, "InferBatchStatistics")
MemoryUsage = pool.message_class(DESCRIPTOR, "MemoryUsage")
ModelStatistics = pool.message_class(DESCRIPTOR, "ModelStatistics")
SystemSharedMemoryStatusRequest = pool.message_class(DESCRIPTOR, "SystemSharedMemoryStatusRequest")
SystemSharedMemoryStatusResponse = pool.message_class(DESCRIPTOR, "SystemSharedMemoryStatusResponse")
SystemSharedMemoryRegisterRequest = pool.message_class(DESCRIPTOR, "SystemSharedMemoryRegisterRequest")
SystemSharedMemoryRegisterResponse = pool.message_class(DESCRIPTOR, "SystemSharedMemoryRegisterResponse")
SystemSharedMemoryUnregisterRequest = pool.message_class(DESCRIPTOR, "SystemSharedMemoryUnregisterRequest")
SystemSharedMemoryUnregisterResponse = pool.message_class(DESCRIPTOR, "SystemSharedMemoryUnregisterResponse")
CudaSharedMemoryStatusRequest = pool.message_class(DESCRIPTOR, "CudaSharedMemoryStatusRequest")
CudaSharedMemoryStatusResponse = pool.message_class(DESCRIPTOR, "CudaSharedMemoryStatusResponse")
CudaSharedMemoryRegisterRequest = pool.message_class(DESCRIPTOR, "CudaSharedMemoryRegisterRequest")
CudaSharedMemoryRegisterResponse = pool.message_class(DESCRIPTOR, "CudaSharedMemoryRegisterResponse")
CudaSharedMemoryUnregisterRequest = pool.message_class(DESCRIPTOR, "CudaSharedMemoryUnregisterRequest")
CudaSharedMemoryUnregisterResponse = pool.message_class(DESCRIPTOR, "CudaSharedMemoryUnregisterResponse")
TraceSettingRequest = pool.message_class(DESCRIPTOR, "TraceSettingRequest")
TraceSettingResponse = pool.message_class(DESCRIPTOR, "TraceSettingResponse")
LogSettingsRequest = pool.message_class(DESCRIPTOR, "LogSettingsRequest")
LogSettingsResponse = pool.message_class(DESCRIPTOR, "LogSettingsResponse")
