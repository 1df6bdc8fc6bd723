"""The vLLM symbols that this package relies on without changing them, with fingerprints of the tested code.

If a symbol changed, our subclass, call or imitation of it may be wrong although nothing fails at once. `vllm-omni-ext
doctor` lists them; they are checked before anything starts. A model family declares those of its own classes
(`ModelFamily.seams`).
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_omni_ext.patching.check import allowed_drift, check
from vllm_omni_ext.patching.source import VllmSource
from vllm_omni_ext.patching.spec import Seam, seams_in
from vllm_omni_ext.patching.transfer_seams import TRANSFER

COMMAND_LINE = (
    *seams_in(
        "vllm.entrypoints.cli.main",
        (
            "maybe_run_omni",
            "204b5b1bd731",
            "calls vllm_omni.entrypoints.cli.main.main, which the start-up hook answers",
        ),
        ("main", "299ed1660ae8", "imitated: our own main parses the same arguments"),
    ),
    *seams_in(
        "vllm.entrypoints.cli.benchmark.main",
        ("BenchmarkSubcommand.subparser_init", "ed19e8622948", "called: `vllm-omni-ext bench`"),
    ),
    *seams_in(
        "vllm.entrypoints.cli.serve",
        ("ServeSubcommand.subparser_init", "05920630e74d", "called: every flag of `vllm serve`"),
        ("run_multi_api_server", "eee6900edf0a", "imitated: order of sockets, engines and API servers"),
        ("run_headless", "1a530c3617b2", "imitated: replicas on another host"),
    ),
    *seams_in(
        "vllm.entrypoints.launchers.cli_args",
        ("make_arg_parser", "ef213c8c38b3", "called: every flag of `vllm serve`"),
        ("validate_parsed_serve_args", "0003979b1b50", "called"),
    ),
    *seams_in("vllm.entrypoints.serve.utils.api_utils", ("cli_env_setup", "234d83be5f29", "called: spawn method")),
)

API_SERVER = (
    *seams_in(
        "vllm.entrypoints.launchers.launcher",
        ("setup_server", "bf3413c14b9a", "called: the listening socket"),
        ("serve_http", "082cd5068db6", "called with peer_loads: which API server takes a connection"),
        ("NoSignalServer", "37a448e37839", "one with the load 2**31 - 1 takes no connections"),
    ),
    *seams_in(
        "vllm.v1.engine.admission_control",
        ("SharedAdmissionStats", "164223dc73f8", "called: one limit of queued requests for all API servers"),
    ),
    *seams_in(
        "vllm.entrypoints.launchers.api_server.entry",
        ("build_and_serve", "c7c6cfb5350f", "imitated: one statement is inserted after the state is built"),
        ("run_server_worker", "bf7a4b0b1c31", "imitated: start of one API server process"),
    ),
    *seams_in("vllm.entrypoints.launchers.api_server.app_state", ("init_app_state", "e97221e1d7d0", "called")),
    *seams_in(
        "vllm.entrypoints.generate.api_router",
        ("init_generate_state", "2ca2ad6ac661", "imitated: arguments of the chat handler"),
    ),
    *seams_in(
        "vllm.entrypoints.openai.chat_completion.serving",
        ("OpenAIServingChat.__init__", "ed198736dd98", "subclassed"),
        ("OpenAIServingChat.chat_completion_full_generator", "1ffad7651a9f", "overridden, calls the original"),
        ("OpenAIServingChat.chat_completion_stream_generator", "f69a8434f95e", "overridden, calls the original"),
        ("OpenAIServingChat._make_parser", "9d37782c731a", "called: the parser of a whole answer's text so far"),
        ("OpenAIServingChat._effective_chat_template_kwargs", "0b266c194669", "called: its arguments"),
    ),
    *seams_in(
        "vllm.parser.abstract_parser",
        ("DelegatingParser.parse_delta", "1aa302e0dd96", "called with the new text of a whole answer"),
    ),
    *seams_in(
        "vllm.entrypoints.serve.middleware.authenticate",
        ("AuthenticationMiddleware", "eb3918b9e651", "subclassed: compares keys; ours stands in its place"),
    ),
    *seams_in(
        "vllm.renderers.base",
        ("BaseRenderer._tokenize_prompt", "ad1066b4d594", "called: ours looks at the length of a text before it"),
        (
            "BaseRenderer._tokenize_singleton_prompt_async",
            "a043053e14de",
            "calls _tokenize_prompt_async, in whose place ours stands",
        ),
    ),
    *seams_in(
        "vllm.renderers.params", ("TokenizeParams._text_len_check", "99d8cf8b1420", "refuses by characters before")
    ),
    *seams_in(
        "vllm.entrypoints.serve.tokenize.serving",
        ("ServingTokenization.create_tokenize", "70d47371b96b", "overridden, calls the original with a limit"),
        ("ServingTokenization.create_detokenize", "f813f27126f4", "overridden, calls the original"),
    ),
    *seams_in(
        "vllm.multimodal.media.connector",
        ("MediaConnector", "7a7abf8b48ab", "subclassed: fetches through its connection; ours stands in the registry"),
    ),
    *seams_in(
        "vllm.multimodal.video", ("VideoLoaderRegistry", "8e135d594bab", "every loader in it is replaced by ours")
    ),
    *seams_in(
        "vllm.multimodal.media.video",
        ("VideoMediaIO.__init__", "269f89b795d8", "takes the loader that was chosen from the registry"),
        ("VideoMediaIO.load_bytes", "f7c9934aa7a3", "calls it with bytes and keywords that msgpack can hold"),
    ),
    *seams_in("vllm.v1.utils", ("APIServerProcessManager.__init__", "8cd615022d91", "called with target_server_fn")),
)

ENGINE_PROCESS = (
    *seams_in(
        "vllm.v1.engine.utils",
        ("bind_engine_zmq_listeners", "308a3a5d5c52", "imitated: one pair of listeners a replica and API server"),
        ("EngineZmqListeners", "2d345ab9596f", "built by hand: the listeners of one replica"),
        ("launch_core_engines", "4ab1886a897e", "called: starts on enter, waits for ready on exit"),
        ("wait_for_engine_startup", "70bbb0fd848f", "imitated: the handshake of a replica that joins later"),
        ("CoreEngineProcManager.__init__", "a6516024cac6", "called: one manager a replica"),
        ("EngineZmqAddresses", "50f5402833a7", "sent in the handshake"),
        ("EngineHandshakeMetadata", "44fda8209ce2", "sent in the handshake"),
    ),
    *seams_in(
        "vllm.v1.engine.core",
        ("EngineCoreProc.startup_handshake", "fac0f9c9ef6a", "answered: HELLO, addresses, READY"),
        ("EngineCoreProc.run_engine_core", "6043bcf10fa8", "process target of a replica"),
        ("EngineCoreProc.__init__", "92a3fcde174f", "makes the scheduler while its input queue exists"),
        ("EngineCoreProc._process_input_queue", "4f146da1a7e7", "its reads of the input queue are the loop's turns"),
        ("EngineCoreProc.has_work", "56db2332dc6d", "a starved engine sleeps because has_requests() is False"),
        ("EngineCoreProc.process_input_sockets", "2fdd9c95b78b", "patched; wire protocol: requests in"),
        ("EngineCoreProc.process_output_sockets", "17bdcc1213d7", "patched; wire protocol: outputs by client index"),
        ("EngineCore.preprocess_add_request", "588865cb2174", "a chunk arrives as a second ADD"),
    ),
    *seams_in(
        "vllm.v1.worker.worker_base",
        (
            "WorkerWrapperBase.init_worker",
            "90b2512de881",
            "asks the platform to replace kernels, as the head did",
        ),
    ),
    *seams_in(
        "vllm.platforms.cpu",
        ("CpuPlatform.register_triton_kernel_overrides", "7e5098c7dfa4", "called once, before replicas are forked"),
    ),
    *seams_in(
        "vllm.utils.network_utils",
        ("make_zmq_listener", "394695639a3e", "called: the listeners of a replica, which stay open in the head"),
        ("make_zmq_socket", "72a4b4a55c25", "takes a listener over, and leaves its path alone when it is closed"),
    ),
    *seams_in(
        "vllm.utils.torch_utils", ("async_tensor_h2d", "bcbf72673d8f", "called: copies to the device without waiting")
    ),
    *seams_in(
        "vllm.v1.engine.core_client",
        (
            "MPClient.__init__",
            "7a87b1dbdbf4",
            "called with client_addresses; waits for each of core_engines",
        ),
        (
            "MPClient._apply_ready_response",
            "2eabfbeef266",
            "overridden, calls the original: keeps what it is given",
        ),
        ("AsyncMPClient.__init__", "c15a9525425c", "called: one client a replica in each API server"),
        ("AsyncMPClient._ensure_output_queue_task", "65165cb30868", "an EngineDeadError in outputs_queue ends it"),
        ("AsyncMPClient.add_request_async", "dcce67ed9fbf", "called: sets client_index"),
    ),
    *seams_in(
        "vllm.v1.engine.async_llm",
        ("AsyncLLM.__init__", "447bcac7f8b3", "imitated: the attributes that generate() uses"),
        ("AsyncLLM._run_output_handler", "e75658908cfe", "inherited: pulls outputs from the pool"),
    ),
    *seams_in(
        "vllm.v1.engine.output_processor",
        ("OutputProcessor.process_outputs", "baad8206c476", "never sees pooling_output of a generation request"),
    ),
    *seams_in(
        "vllm.v1.engine",
        ("EngineCoreRequest", "cdbc7cfef874", "built by hand; the order of its fields is the wire format"),
        ("EngineCoreOutput", "9a93bc7b7c79", "read; pooling_output carries tensors"),
        ("EngineCoreOutputs", "0ebf1d198be2", "read; finished requests and scheduler statistics"),
    ),
)

SCHEDULER = (
    *seams_in(
        "vllm.v1.core.sched.interface",
        ("SchedulerInterface", "ff0ef002cf47", "implemented by the one-step-a-denoise scheduler"),
    ),
    *seams_in(
        "vllm.v1.core.sched.scheduler",
        ("Scheduler.__init__", "74c31cd5056b", "subclassed"),
        (
            "Scheduler.schedule",
            "272db55b70fe",
            "overridden: holds starved requests by next_decode_eligible_step, short by max_num_scheduled_tokens",
        ),
        (
            "Scheduler._reserve_prefill_lookahead",
            "1570acd92f79",
            "overridden: asked about every request of a step, it limits a request to what is known of its input",
        ),
        ("Scheduler.add_request", "55013f31efc9", "overridden: takes chunks of known requests"),
        ("Scheduler.update_from_output", "941ee1677f37", "passes pooler_output of a generation request on"),
        ("Scheduler.finish_requests", "f2be1ab8f2d8", "overridden: drops what is held for a request"),
        ("Scheduler.get_request_counts", "d8592c579949", "called: what a replica reports of itself"),
        ("Scheduler.shutdown", "f6cb569970b7", "overridden, calls the original: a replica takes leave"),
        ("Scheduler.has_requests", "e6c08f9e9cf7", "overridden: False when everything left is starved"),
    ),
    *seams_in(
        "vllm.v1.core.sched.async_scheduler",
        ("AsyncScheduler._update_after_schedule", "ff4ab5e68eab", "subclassed: placeholders count as output tokens"),
    ),
    *seams_in("vllm.v1.core.sched.output", ("SchedulerOutput", "d0962f5659b5", "carries our payload to the worker")),
    *seams_in(
        "vllm.v1.core.sched.utils",
        ("check_stop", "8cac71c343aa", "called: ends the texts of plain stages"),
    ),
    *seams_in("vllm.v1.request", ("Request.__init__", "7e19a5e2ee07", "read by the schedulers")),
)

WORKER = (
    *seams_in("vllm.v1.outputs", ("ModelRunnerOutput", "ed91bef27164", "pooler_output is set by our worker")),
    *seams_in(
        "vllm.v1.worker.gpu_worker",
        ("Worker.execute_model", "25bae4b9012c", "overridden, calls the original"),
        ("Worker.sample_tokens", "bd121c3baba8", "overridden, calls the original"),
        ("Worker.compile_or_warm_up_model", "bb41a0d4a1b8", "overridden, calls the original"),
        ("Worker.load_model", "e09c4b7d0a2d", "overridden, calls the original"),
    ),
    *seams_in(
        "vllm.v1.sample.ops.topk_topp_sampler",
        ("TopKTopPSampler.forward_cpu", "52cb06166a0c", "called to draw as often as a lost replica has"),
        ("TopKTopPSampler.forward_native", "e70aa664a7c3", "called to draw as often as a lost replica has"),
        ("random_sample", "e6d5e361568e", "one draw a token for each request with a generator"),
    ),
    *seams_in(
        "vllm.v1.worker.gpu_model_runner",
        ("GPUModelRunner._preprocess", "7b2ec35f04f0", "asks the model's embed_input_ids for the rows of a step"),
        (
            "GPUModelRunner._init_mrope_positions",
            "0dd082db7532",
            "asks the model for positions, request by request",
        ),
        ("GPUModelRunner.execute_model", "00b038acec00", "keeps auxiliary hidden states for sample_tokens"),
        ("ExecuteModelState", "5ea79877f717", "read between execute_model and sample_tokens"),
        ("GPUModelRunner.sample_tokens", "d6f8b90a0ddc", "runs the sampler that the code predictor follows"),
        (
            "GPUModelRunner._execute_mm_encoder",
            "3a7c7468e0cd",
            "called once for each request with sound, so that clips of several are not padded to each other",
        ),
        (
            "GPUModelRunner._bookkeeping_sync",
            "7bae99d10c86",
            "turns generators back, which CPU generators cannot: our workers keep them away from it",
        ),
    ),
    *seams_in(
        "vllm.v1.worker.cpu_worker",
        ("CPUWorker.init_device", "7d1057108cfe", "overridden, calls the original with one process group for all"),
    ),
    *seams_in(
        "vllm.distributed.parallel_state",
        (
            "GroupCoordinator.__init__",
            "115480973964",
            "makes groups by torch.distributed.new_group",
        ),
    ),
    *seams_in(
        "vllm.v1.cudagraph_dispatcher",
        ("CudagraphDispatcher.dispatch", "7284b6eb83df", "dispatches without graphs while keys_initialized is false"),
    ),
    *seams_in(
        "vllm.v1.worker.gpu.model_runner",
        ("GPUModelRunner.execute_model", "a167d8a363b7", "keeps auxiliary hidden states for sample_tokens"),
        ("ExecuteModelState", "78d1ace8d0ef", "read between execute_model and sample_tokens"),
    ),
    *seams_in(
        "vllm.v1.worker.gpu.cudagraph_utils",
        ("CudaGraphManager.dispatch", "db695ef419d6", "dispatches without graphs while _graphs_captured is false"),
    ),
    *seams_in(
        "vllm.v1.worker.gpu.model_states",
        ("resolve_model_state_cls", "731582eef8c4", "asks the model class for get_model_state_cls()"),
    ),
    *seams_in("vllm.v1.worker.gpu.model_states.interface", ("ModelState", "20eef17e3c98", "subclassed")),
    *seams_in(
        "vllm.v1.worker.gpu.model_states.default",
        ("DefaultModelState.prepare_inputs_embeds", "6f40a8e76273", "overridden: the rows of a step are the model's"),
    ),
    *seams_in(
        "vllm.v1.worker.gpu.model_states.interface",
        ("ModelState.execute_mm_encoder", "c6be6d6d2c87", "called once for each request with sound"),
    ),
    *seams_in("vllm.v1.worker.gpu.warmup", ("warmup_kernels", "f42e3b8b8296", "called for eager stages on CUDA")),
    *seams_in(
        "vllm.v1.worker.gpu.input_batch",
        ("post_update_num_computed_tokens", "2ce30bee363f", "called once, to compile its kernel"),
    ),
)

MODELS = (
    *seams_in(
        "vllm.model_executor.models.interfaces",
        (
            "SupportsEagle3.set_aux_hidden_state_layers",
            "e071d46e1c02",
            "called: the exported layer, before compilation or for a step",
        ),
        ("EagleModelMixin._maybe_add_hidden_state", "dd7962670a1d", "outputs come in the order of their layers"),
    ),
)

STAGE_CALLS = (
    *seams_in(
        "vllm.model_executor.model_loader",
        (
            "register_model_loader",
            "1d27e57d3acd",
            "called: a loader that counts, while a replica loads",
        ),
        ("get_model_loader", "ea6efbfde0a3", "called: makes the loader that is subclassed; looks load_format up"),
    ),
    *seams_in(
        "vllm.model_executor.model_loader.default_loader",
        ("DefaultModelLoader._prepare_weights", "3150e133ac64", "overridden, calls the original: notes the files"),
        (
            "DefaultModelLoader.load_weights",
            "416174ba796f",
            "overridden, calls the original: counts what it hands over",
        ),
    ),
    *seams_in(
        "vllm.v1.engine.core_client",
        (
            "AsyncMPClient._call_utility_async",
            "2a313868d1bd",
            "called; its future never ends when the engine dies, so ours does",
        ),
    ),
    *seams_in(
        "vllm.v1.engine.core",
        ("EngineCore.sleep", "f0e6cc2895ae", "called as a utility: pauses the scheduler before anything can fail"),
        (
            "EngineCoreProc.pause_scheduler",
            "5c7f888a3220",
            "tells clients of what our scheduler's finish_requests returns",
        ),
    ),
    *seams_in(
        "vllm.v1.engine.async_llm",
        ("AsyncLLM.sleep", "bcc1ce524bfc", "overridden, calls the original; imitated for single replicas"),
        ("AsyncLLM.wake_up", "577dee82937f", "overridden, calls the original; imitated for single replicas"),
        ("AsyncLLM.reset_mm_cache", "b8974291bbf1", "overridden, calls the original; imitated for single replicas"),
        ("AsyncLLM.start_profile", "b8eb4fff3c3b", "overridden, calls the original"),
    ),
    *seams_in(
        "vllm.v1.metrics.loggers",
        ("PrometheusStatLogger.record_sleep_state", "d887d927be7d", "imitated for single engines"),
        (
            "PrometheusStatLogger.__init__",
            "8510b25fe0a2",
            "called: all engines, and each one that joins",
        ),
        (
            "PrometheusStatLogger.log_metrics_info",
            "db26cb5f98a8",
            "imitated: a cache config for each replica",
        ),
        ("StatLoggerManager.__init__", "65b4a039ac0c", "called: the loggers of the planned replicas"),
        ("StatLoggerManager.record", "353263c17115", "imitated: replicas that join have loggers of their own"),
    ),
    *seams_in(
        "vllm.entrypoints.serve.dev.rpc.api_router",
        ("collective_rpc", "6478c9d9dff7", "called when there are no targets; imitated"),
    ),
    *seams_in(
        "vllm.entrypoints.serve.lora.api_router",
        ("_attach_router", "18071d49a560", "imitated: the two routes"),
    ),
    *seams_in(
        "vllm.entrypoints.openai.models.serving",
        ("OpenAIServingModels.load_lora_adapter", "b0d32c22feb4", "called on a copy with an engine client of ours"),
        ("OpenAIServingModels.unload_lora_adapter", "50c8b686bc7c", "called on a copy"),
    ),
)

SEAMS: tuple[Seam, ...] = (
    COMMAND_LINE + API_SERVER + ENGINE_PROCESS + STAGE_CALLS + SCHEDULER + WORKER + MODELS + TRANSFER
)


def check_seams(
    seams: Sequence[Seam] = SEAMS, source: VllmSource | None = None, *, allowed: frozenset[str] | None = None
) -> None:
    """Raise IncompatibleVllm, naming each symbol, if vLLM's code differs from the code that `seams` were tested with.

    Reads sources only (about half a second); imports nothing of vLLM. VLLM_OMNI_EXT_ALLOW_DRIFT accepts single names.
    """
    check(seams, source or VllmSource.installed(), allowed=allowed_drift() if allowed is None else allowed)
