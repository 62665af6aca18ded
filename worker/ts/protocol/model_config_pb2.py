# Generated from protos/model_config.proto by ts_scripts/gen_protos.py: change that file, not this one.
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from ts.protocol import pool

DESCRIPTOR = pool.register(
    b'\n\x12model_config.proto\x12\tinference"\xf3\n\n\x0bModelConfig\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x10\n\x08platfor'
    b'm\x18\x02 \x01(\t\x12\x0f\n\x07backend\x18\x11 \x01(\t\x12\x0f\n\x07runtime\x18\x19 \x01(\t\x125\n\x0eversion_policy\x18\x03 \x01(\x0b2\x1d.infe'
    b'rence.ModelVersionPolicy\x12\x16\n\x0emax_batch_size\x18\x04 \x01(\x05\x12$\n\x05input\x18\x05 \x03(\x0b2\x15.infere'
    b'nce.ModelInput\x12&\n\x06output\x18\x06 \x03(\x0b2\x16.inference.ModelOutput\x12*\n\x0bbatch_input\x18\x14 '
    b'\x03(\x0b2\x15.inference.BatchInput\x12,\n\x0cbatch_output\x18\x15 \x03(\x0b2\x16.inference.BatchOutput'
    b'\x12;\n\x10dynamic_batching\x18\x0b \x01(\x0b2\x1f.inference.ModelDynamicBatchingH\x00\x12=\n\x11sequenc'
    b'e_batching\x18\r \x01(\x0b2 .inference.ModelSequenceBatchingH\x00\x129\n\x13ensemble_schedul'
    b'ing\x18\x0f \x01(\x0b2\x1a.inference.ModelEnsemblingH\x00\x125\n\x0einstance_group\x18\x07 \x03(\x0b2\x1d.infere'
    b'nce.ModelInstanceGroup\x12C\n\x18model_transaction_policy\x18\x13 \x01(\x0b2!.inference.Mod'
    b'elTransactionPolicy\x12\x1e\n\x16default_model_filename\x18\x08 \x01(\t\x12H\n\x12cc_model_filename'
    b's\x18\t \x03(\x0b2,.inference.ModelConfig.CcModelFilenamesEntry\x12;\n\x0bmetric_tags\x18\n \x03'
    b'(\x0b2&.inference.ModelConfig.MetricTagsEntry\x12:\n\nparameters\x18\x0e \x03(\x0b2&.inferen'
    b'ce.ModelConfig.ParametersEntry\x12,\n\x0cmodel_warmup\x18\x10 \x03(\x0b2\x16.inference.ModelWa'
    b'rmup\x128\n\x0coptimization\x18\x0c \x01(\x0b2".inference.ModelOptimizationPolicy\x124\n\x10model_'
    b'operations\x18\x12 \x01(\x0b2\x1a.inference.ModelOperations\x12A\n\x17model_repository_agents\x18'
    b'\x17 \x01(\x0b2 .inference.ModelRepositoryAgents\x125\n\x0eresponse_cache\x18\x18 \x01(\x0b2\x1d.infere'
    b'nce.ModelResponseCache\x12.\n\rmodel_metrics\x18\x1a \x01(\x0b2\x17.inference.ModelMetrics\x1a7'
    b'\n\x15CcModelFilenamesEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12\r\n\x05value\x18\x02 \x01(\t:\x028\x01\x1a1\n\x0fMetricTagsEnt'
    b'ry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12\r\n\x05value\x18\x02 \x01(\t:\x028\x01\x1aL\n\x0fParametersEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12(\n\x05va'
    b'lue\x18\x02 \x01(\x0b2\x19.inference.ModelParameter:\x028\x01B\x13\n\x11scheduling_choice"\x90\x02\n\x12ModelV'
    b'ersionPolicy\x126\n\x06latest\x18\x01 \x01(\x0b2$.inference.ModelVersionPolicy.LatestH\x00\x120\n\x03'
    b'all\x18\x02 \x01(\x0b2!.inference.ModelVersionPolicy.AllH\x00\x12:\n\x08specific\x18\x03 \x01(\x0b2&.infer'
    b'ence.ModelVersionPolicy.SpecificH\x00\x1a\x1e\n\x06Latest\x12\x14\n\x0cnum_versions\x18\x01 \x01(\r\x1a\x05\n\x03Al'
    b'l\x1a\x1c\n\x08Specific\x12\x10\n\x08versions\x18\x01 \x03(\x03B\x0f\n\rpolicy_choice"+\n\x16ModelTransactionPoli'
    b'cy\x12\x11\n\tdecoupled\x18\x01 \x01(\x08"&\n\x0eModelParameter\x12\x14\n\x0cstring_value\x18\x01 \x01(\t"#\n\x12ModelTe'
    b'nsorReshape\x12\r\n\x05shape\x18\x01 \x03(\x03"\xd3\x02\n\nModelInput\x12\x0c\n\x04name\x18\x01 \x01(\t\x12&\n\tdata_type\x18\x02 \x01'
    b'(\x0e2\x13.inference.DataType\x12,\n\x06format\x18\x03 \x01(\x0e2\x1c.inference.ModelInput.Format\x12\x0c\n'
    b'\x04dims\x18\x04 \x03(\x03\x12.\n\x07reshape\x18\x05 \x01(\x0b2\x1d.inference.ModelTensorReshape\x12\x17\n\x0fis_shape_'
    b'tensor\x18\x06 \x01(\x08\x12\x1a\n\x12allow_ragged_batch\x18\x07 \x01(\x08\x12\x10\n\x08optional\x18\x08 \x01(\x08\x12\x1f\n\x17is_non_lin'
    b'ear_format_io\x18\t \x01(\x08";\n\x06Format\x12\x0f\n\x0bFORMAT_NONE\x10\x00\x12\x0f\n\x0bFORMAT_NHWC\x10\x01\x12\x0f\n\x0bFORMA'
    b'T_NCHW\x10\x02"\xd3\x01\n\x0bModelOutput\x12\x0c\n\x04name\x18\x01 \x01(\t\x12&\n\tdata_type\x18\x02 \x01(\x0e2\x13.inference.Da'
    b'taType\x12\x0c\n\x04dims\x18\x03 \x03(\x03\x12\x16\n\x0elabel_filename\x18\x04 \x01(\t\x12.\n\x07reshape\x18\x05 \x01(\x0b2\x1d.inferenc'
    b'e.ModelTensorReshape\x12\x17\n\x0fis_shape_tensor\x18\x06 \x01(\x08\x12\x1f\n\x17is_non_linear_format_io'
    b'\x18\x07 \x01(\x08"\xd9\x02\n\nBatchInput\x12(\n\x04kind\x18\x01 \x01(\x0e2\x1a.inference.BatchInput.Kind\x12\x13\n\x0btarge'
    b't_name\x18\x02 \x03(\t\x12&\n\tdata_type\x18\x03 \x01(\x0e2\x13.inference.DataType\x12\x14\n\x0csource_input\x18\x04 \x03'
    b'(\t"\xcd\x01\n\x04Kind\x12\x17\n\x13BATCH_ELEMENT_COUNT\x10\x00\x12#\n\x1fBATCH_ACCUMULATED_ELEMENT_COUNT\x10'
    b'\x01\x12-\n)BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO\x10\x02\x12$\n BATCH_MAX_ELEMENT_CO'
    b'UNT_AS_SHAPE\x10\x03\x12\x14\n\x10BATCH_ITEM_SHAPE\x10\x04\x12\x1c\n\x18BATCH_ITEM_SHAPE_FLATTEN\x10\x05"\x8f\x01\n\x0bB'
    b'atchOutput\x12\x13\n\x0btarget_name\x18\x01 \x03(\t\x12)\n\x04kind\x18\x02 \x01(\x0e2\x1b.inference.BatchOutput.Ki'
    b'nd\x12\x14\n\x0csource_input\x18\x03 \x03(\t"*\n\x04Kind\x12"\n\x1eBATCH_SCATTER_WITH_INPUT_SHAPE\x10\x00"\x87\x04\n'
    b'\x12ModelInstanceGroup\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\r\n\x05count\x18\x02 \x01(\x05\x12\x0c\n\x04gpus\x18\x03 \x03(\x05\x120\n\x04kind\x18\x04'
    b' \x01(\x0e2".inference.ModelInstanceGroup.Kind\x12\x0f\n\x07profile\x18\x05 \x03(\t\x121\n\x0crate_limite'
    b'r\x18\x06 \x01(\x0b2\x1b.inference.ModelRateLimiter\x12\x0f\n\x07passive\x18\x07 \x01(\x08\x12H\n\x11secondary_devic'
    b'es\x18\x08 \x03(\x0b2-.inference.ModelInstanceGroup.SecondaryDevice\x12\x13\n\x0bhost_policy\x18\t'
    b' \x01(\t\x1a\x9c\x01\n\x0fSecondaryDevice\x12O\n\x04kind\x18\x01 \x01(\x0e2A.inference.ModelInstanceGroup.Se'
    b'condaryDevice.SecondaryDeviceKind\x12\x11\n\tdevice_id\x18\x02 \x01(\x03"%\n\x13SecondaryDeviceK'
    b'ind\x12\x0e\n\nKIND_NVDLA\x10\x00"A\n\x04Kind\x12\r\n\tKIND_AUTO\x10\x00\x12\x0c\n\x08KIND_GPU\x10\x01\x12\x0c\n\x08KIND_CPU\x10\x02\x12\x0e'
    b'\n\nKIND_MODEL\x10\x03"\x96\x01\n\x10ModelRateLimiter\x127\n\tresources\x18\x01 \x03(\x0b2$.inference.Model'
    b'RateLimiter.Resource\x12\x10\n\x08priority\x18\x02 \x01(\r\x1a7\n\x08Resource\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x0e\n\x06glob'
    b'al\x18\x02 \x01(\x08\x12\r\n\x05count\x18\x03 \x01(\r"\xdb\x01\n\x10ModelQueuePolicy\x12A\n\x0etimeout_action\x18\x01 \x01(\x0e2).i'
    b'nference.ModelQueuePolicy.TimeoutAction\x12$\n\x1cdefault_timeout_microseconds\x18'
    b'\x02 \x01(\x04\x12\x1e\n\x16allow_timeout_override\x18\x03 \x01(\x08\x12\x16\n\x0emax_queue_size\x18\x04 \x01(\r"&\n\rTimeout'
    b'Action\x12\n\n\x06REJECT\x10\x00\x12\t\n\x05DELAY\x10\x01"\x9b\x03\n\x14ModelDynamicBatching\x12\x1c\n\x14preferred_batc'
    b'h_size\x18\x01 \x03(\x05\x12$\n\x1cmax_queue_delay_microseconds\x18\x02 \x01(\x04\x12\x19\n\x11preserve_ordering\x18'
    b'\x03 \x01(\x08\x12\x17\n\x0fpriority_levels\x18\x04 \x01(\x04\x12\x1e\n\x16default_priority_level\x18\x05 \x01(\x04\x129\n\x14defaul'
    b't_queue_policy\x18\x06 \x01(\x0b2\x1b.inference.ModelQueuePolicy\x12W\n\x15priority_queue_poli'
    b'cy\x18\x07 \x03(\x0b28.inference.ModelDynamicBatching.PriorityQueuePolicyEntry\x1aW\n\x18Pr'
    b'iorityQueuePolicyEntry\x12\x0b\n\x03key\x18\x01 \x01(\x04\x12*\n\x05value\x18\x02 \x01(\x0b2\x1b.inference.ModelQueu'
    b'ePolicy:\x028\x01"\xee\n\n\x15ModelSequenceBatching\x12&\n\x1emax_sequence_idle_microseconds\x18'
    b'\x01 \x01(\x04\x12D\n\rcontrol_input\x18\x02 \x03(\x0b2-.inference.ModelSequenceBatching.ControlIn'
    b'put\x12A\n\x06direct\x18\x03 \x01(\x0b2/.inference.ModelSequenceBatching.StrategyDirectH\x00\x12A'
    b'\n\x06oldest\x18\x04 \x01(\x0b2/.inference.ModelSequenceBatching.StrategyOldestH\x00\x125\n\x05sta'
    b'te\x18\x05 \x03(\x0b2&.inference.ModelSequenceBatching.State\x12\x1a\n\x12iterative_sequence\x18\x06'
    b' \x01(\x08\x1a\xb1\x02\n\x07Control\x12;\n\x04kind\x18\x01 \x01(\x0e2-.inference.ModelSequenceBatching.Control'
    b'.Kind\x12\x18\n\x10int32_false_true\x18\x02 \x03(\x05\x12\x17\n\x0ffp32_false_true\x18\x03 \x03(\x02\x12&\n\tdata_type\x18\x04 '
    b'\x01(\x0e2\x13.inference.DataType\x12\x17\n\x0fbool_false_true\x18\x05 \x03(\x08"u\n\x04Kind\x12\x1a\n\x16CONTROL_SEQ'
    b'UENCE_START\x10\x00\x12\x1a\n\x16CONTROL_SEQUENCE_READY\x10\x01\x12\x18\n\x14CONTROL_SEQUENCE_END\x10\x02\x12\x1b\n\x17C'
    b'ONTROL_SEQUENCE_CORRID\x10\x03\x1aW\n\x0cControlInput\x12\x0c\n\x04name\x18\x01 \x01(\t\x129\n\x07control\x18\x02 \x03(\x0b2'
    b'(.inference.ModelSequenceBatching.Control\x1a\x8a\x01\n\x0cInitialState\x12&\n\tdata_type\x18'
    b'\x01 \x01(\x0e2\x13.inference.DataType\x12\x0c\n\x04dims\x18\x02 \x03(\x03\x12\x13\n\tzero_data\x18\x03 \x01(\x08H\x00\x12\x13\n\tdata_fi'
    b'le\x18\x04 \x01(\tH\x00\x12\x0c\n\x04name\x18\x05 \x01(\tB\x0c\n\nstate_data\x1a\xf3\x01\n\x05State\x12\x12\n\ninput_name\x18\x01 \x01(\t\x12\x13\n\x0b'
    b'output_name\x18\x02 \x01(\t\x12&\n\tdata_type\x18\x03 \x01(\x0e2\x13.inference.DataType\x12\x0c\n\x04dims\x18\x04 \x03(\x03\x12'
    b'D\n\rinitial_state\x18\x05 \x03(\x0b2-.inference.ModelSequenceBatching.InitialState\x12(\n'
    b' use_same_buffer_for_input_output\x18\x06 \x01(\x08\x12\x1b\n\x13use_growable_memory\x18\x07 \x01(\x08\x1aX\n\x0e'
    b'StrategyDirect\x12$\n\x1cmax_queue_delay_microseconds\x18\x01 \x01(\x04\x12 \n\x18minimum_slot_uti'
    b'lization\x18\x02 \x01(\x02\x1a\x90\x01\n\x0eStrategyOldest\x12\x1f\n\x17max_candidate_sequences\x18\x01 \x01(\x05\x12\x1c\n\x14pr'
    b'eferred_batch_size\x18\x02 \x03(\x05\x12$\n\x1cmax_queue_delay_microseconds\x18\x03 \x01(\x04\x12\x19\n\x11preser'
    b've_ordering\x18\x04 \x01(\x08B\x11\n\x0fstrategy_choice"\x95\x03\n\x0fModelEnsembling\x12-\n\x04step\x18\x01 \x03(\x0b2\x1f'
    b'.inference.ModelEnsembling.Step\x12\x1d\n\x15max_inflight_requests\x18\x02 \x01(\r\x1a\xb3\x02\n\x04Step\x12'
    b'\x12\n\nmodel_name\x18\x01 \x01(\t\x12\x15\n\rmodel_version\x18\x02 \x01(\x03\x12@\n\tinput_map\x18\x03 \x03(\x0b2-.inferenc'
    b'e.ModelEnsembling.Step.InputMapEntry\x12B\n\noutput_map\x18\x04 \x03(\x0b2..inference.Mod'
    b'elEnsembling.Step.OutputMapEntry\x12\x17\n\x0fmodel_namespace\x18\x05 \x01(\t\x1a/\n\rInputMapEnt'
    b'ry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12\r\n\x05value\x18\x02 \x01(\t:\x028\x01\x1a0\n\x0eOutputMapEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12\r\n\x05val'
    b'ue\x18\x02 \x01(\t:\x028\x01"\xd9\x02\n\x0bModelWarmup\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x12\n\nbatch_size\x18\x02 \x01(\r\x122\n\x06inputs'
    b'\x18\x03 \x03(\x0b2".inference.ModelWarmup.InputsEntry\x12\r\n\x05count\x18\x04 \x01(\r\x1a\x97\x01\n\x05Input\x12&\n\td'
    b'ata_type\x18\x01 \x01(\x0e2\x13.inference.DataType\x12\x0c\n\x04dims\x18\x02 \x03(\x03\x12\x13\n\tzero_data\x18\x03 \x01(\x08H\x00\x12\x15'
    b'\n\x0brandom_data\x18\x04 \x01(\x08H\x00\x12\x19\n\x0finput_data_file\x18\x05 \x01(\tH\x00B\x11\n\x0finput_data_type\x1aK\n\x0bI'
    b'nputsEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12+\n\x05value\x18\x02 \x01(\x0b2\x1c.inference.ModelWarmup.Input:\x028\x01'
    b'"\xfd\r\n\x17ModelOptimizationPolicy\x127\n\x05graph\x18\x01 \x01(\x0b2(.inference.ModelOptimizatio'
    b'nPolicy.Graph\x12B\n\x08priority\x18\x02 \x01(\x0e20.inference.ModelOptimizationPolicy.Mode'
    b"lPriority\x125\n\x04cuda\x18\x03 \x01(\x0b2'.inference.ModelOptimizationPolicy.Cuda\x12X\n\x16exec"
    b'ution_accelerators\x18\x04 \x01(\x0b28.inference.ModelOptimizationPolicy.ExecutionAc'
    b'celerators\x12R\n\x13input_pinned_memory\x18\x05 \x01(\x0b25.inference.ModelOptimizationPol'
    b'icy.PinnedMemoryBuffer\x12S\n\x14output_pinned_memory\x18\x06 \x01(\x0b25.inference.ModelOp'
    b'timizationPolicy.PinnedMemoryBuffer\x12&\n\x1egather_kernel_buffer_threshold\x18\x07 '
    b'\x01(\r\x12\x16\n\x0eeager_batching\x18\x08 \x01(\x08\x1a\x16\n\x05Graph\x12\r\n\x05level\x18\x01 \x01(\x05\x1a\xba\x05\n\x04Cuda\x12\x0e\n\x06graphs\x18\x01'
    b' \x01(\x08\x12\x18\n\x10busy_wait_events\x18\x02 \x01(\x08\x12E\n\ngraph_spec\x18\x03 \x03(\x0b21.inference.ModelOpti'
    b'mizationPolicy.Cuda.GraphSpec\x12\x1a\n\x12output_copy_stream\x18\x04 \x01(\x08\x1a\xa4\x04\n\tGraphSpec\x12'
    b'\x12\n\nbatch_size\x18\x01 \x01(\x05\x12K\n\x05input\x18\x02 \x03(\x0b2<.inference.ModelOptimizationPolicy.C'
    b'uda.GraphSpec.InputEntry\x12W\n\x11graph_lower_bound\x18\x03 \x01(\x0b2<.inference.ModelOpt'
    b'imizationPolicy.Cuda.GraphSpec.LowerBound\x1a\x14\n\x05Shape\x12\x0b\n\x03dim\x18\x01 \x03(\x03\x1a\xdf\x01\n\nLowe'
    b'rBound\x12\x12\n\nbatch_size\x18\x01 \x01(\x05\x12V\n\x05input\x18\x02 \x03(\x0b2G.inference.ModelOptimizationP'
    b'olicy.Cuda.GraphSpec.LowerBound.InputEntry\x1ae\n\nInputEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12F\n'
    b'\x05value\x18\x02 \x01(\x0b27.inference.ModelOptimizationPolicy.Cuda.GraphSpec.Shape:\x028'
    b'\x01\x1ae\n\nInputEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12F\n\x05value\x18\x02 \x01(\x0b27.inference.ModelOptimizatio'
    b'nPolicy.Cuda.GraphSpec.Shape:\x028\x01\x1a\xa4\x03\n\x15ExecutionAccelerators\x12g\n\x19gpu_execut'
    b'ion_accelerator\x18\x01 \x03(\x0b2D.inference.ModelOptimizationPolicy.ExecutionAccel'
    b'erators.Accelerator\x12g\n\x19cpu_execution_accelerator\x18\x02 \x03(\x0b2D.inference.Model'
    b'OptimizationPolicy.ExecutionAccelerators.Accelerator\x1a\xb8\x01\n\x0bAccelerator\x12\x0c\n\x04'
    b'name\x18\x01 \x01(\t\x12h\n\nparameters\x18\x02 \x03(\x0b2T.inference.ModelOptimizationPolicy.Execu'
    b'tionAccelerators.Accelerator.ParametersEntry\x1a1\n\x0fParametersEntry\x12\x0b\n\x03key\x18\x01'
    b' \x01(\t\x12\r\n\x05value\x18\x02 \x01(\t:\x028\x01\x1a$\n\x12PinnedMemoryBuffer\x12\x0e\n\x06enable\x18\x01 \x01(\x08"I\n\rModelPr'
    b'iority\x12\x14\n\x10PRIORITY_DEFAULT\x10\x00\x12\x10\n\x0cPRIORITY_MAX\x10\x01\x12\x10\n\x0cPRIORITY_MIN\x10\x02".\n\x0fMode'
    b'lOperations\x12\x1b\n\x13op_library_filename\x18\x01 \x03(\t"\xe6\x01\n\x15ModelRepositoryAgents\x126\n\x06ag'
    b'ents\x18\x01 \x03(\x0b2&.inference.ModelRepositoryAgents.Agent\x1a\x94\x01\n\x05Agent\x12\x0c\n\x04name\x18\x01 \x01'
    b'(\t\x12J\n\nparameters\x18\x02 \x03(\x0b26.inference.ModelRepositoryAgents.Agent.Parameter'
    b'sEntry\x1a1\n\x0fParametersEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12\r\n\x05value\x18\x02 \x01(\t:\x028\x01"$\n\x12ModelRespon'
    b'seCache\x12\x0e\n\x06enable\x18\x01 \x01(\x08"\xe2\x02\n\x0cModelMetrics\x12=\n\x0emetric_control\x18\x01 \x03(\x0b2%.infer'
    b'ence.ModelMetrics.MetricControl\x1a\x92\x02\n\rMetricControl\x12Q\n\x11metric_identifier\x18\x01'
    b' \x01(\x0b26.inference.ModelMetrics.MetricControl.MetricIdentifier\x12S\n\x11histogra'
    b'm_options\x18\x02 \x01(\x0b26.inference.ModelMetrics.MetricControl.HistogramOptionsH'
    b'\x00\x1a"\n\x10MetricIdentifier\x12\x0e\n\x06family\x18\x01 \x01(\t\x1a#\n\x10HistogramOptions\x12\x0f\n\x07buckets\x18\x01 \x03'
    b'(\x01B\x10\n\x0emetric_options*\xfa\x01\n\x08DataType\x12\x10\n\x0cTYPE_INVALID\x10\x00\x12\r\n\tTYPE_BOOL\x10\x01\x12\x0e\n\nTY'
    b'PE_UINT8\x10\x02\x12\x0f\n\x0bTYPE_UINT16\x10\x03\x12\x0f\n\x0bTYPE_UINT32\x10\x04\x12\x0f\n\x0bTYPE_UINT64\x10\x05\x12\r\n\tTYPE_IN'
    b'T8\x10\x06\x12\x0e\n\nTYPE_INT16\x10\x07\x12\x0e\n\nTYPE_INT32\x10\x08\x12\x0e\n\nTYPE_INT64\x10\t\x12\r\n\tTYPE_FP16\x10\n\x12\r\n\tT'
    b'YPE_FP32\x10\x0b\x12\r\n\tTYPE_FP64\x10\x0c\x12\x0f\n\x0bTYPE_STRING\x10\r\x12\r\n\tTYPE_BF16\x10\x0eb\x06proto3'
)

DataType = EnumTypeWrapper(DESCRIPTOR.enum_types_by_name["DataType"])
TYPE_INVALID = 0
TYPE_BOOL = 1
TYPE_UINT8 = 2
TYPE_UINT16 = 3
TYPE_UINT32 = 4
TYPE_UINT64 = 5
TYPE_INT8 = 6
TYPE_INT16 = 7
TYPE_INT32 = 8
TYPE_INT64 = 9
TYPE_FP16 = 10
TYPE_FP32 = 11
TYPE_FP64 = 12
TYPE_STRING = 13
TYPE_BF16 = 14
ModelConfig = pool.message_class(DESCRIPTOR, "ModelConfig")
ModelVersionPolicy = pool.message_class(DESCRIPTOR, "ModelVersionPolicy")
ModelTransactionPolicy = pool.message_class(DESCRIPTOR, "ModelTransactionPolicy")
ModelParameter = pool.message_class(DESCRIPTOR, "ModelParameter")
ModelTensorReshape = pool.message_class(DESCRIPTOR, "ModelTensorReshape")
ModelInput = pool.message_class(DESCRIPTOR, "ModelInput")
ModelOutput = pool.message_class(DESCRIPTOR, "ModelOutput")
BatchInput = pool.message_class(DESCRIPTOR, "BatchInput")
BatchOutput = pool.message_class(DESCRIPTOR, "BatchOutput")
ModelInstanceGroup = pool.message_class(DESCRIPTOR, "ModelInstanceGroup")
ModelRateLimiter = pool.message_class(DESCRIPTOR, "ModelRateLimiter")
ModelQueuePolicy = pool.message_class(DESCRIPTOR, "ModelQueuePolicy")
ModelDynamicBatching = pool.message_class(DESCRIPTOR, "ModelDynamicBatching")
ModelSequenceBatching = pool.message_class(DESCRIPTOR, "ModelSequenceBatching")
ModelEnsembling = pool.message_class(DESCRIPTOR, "ModelEnsembling")
ModelWarmup = pool.message_class(DESCRIPTOR, "ModelWarmup")
ModelOptimizationPolicy = pool.message_class(DESCRIPTOR, "ModelOptimizationPolicy")
ModelOperations = pool.message_class(DESCRIPTOR, "ModelOperations")
ModelRepositoryAgents = pool.message_class(DESCRIPTOR, "ModelRepositoryAgents")
ModelResponseCache = pool.message_class(DESCRIPTOR, "ModelResponseCache")
ModelMetrics = pool.message_class(DESCRIPTOR, "ModelMetrics")
