"""The vLLM symbols that prefill-decode disaggregation relies on: KV connectors and their callers. See `seams.py`."""

from __future__ import annotations

from vllm_omni_ext.patching.spec import seams_in

_MOONCAKE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake"
_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
_HALVES = "subclassed: our own halves of the connector are built"

TRANSFER = (
    *seams_in(
        f"{_MOONCAKE}.mooncake_connector",
        ("MooncakeConnector.__init__", "ab502102bb10", "imitated: builds the two halves"),
        ("MooncakeConnector.start_load_kv", "ce6b77e2e93b", "overridden, calls the original"),
        ("MooncakeConnectorScheduler.__init__", "64a5c9f0f62c", _HALVES),
        ("MooncakeConnectorScheduler.on_new_request", "838b3929527a", "overridden, calls the original"),
        (
            "MooncakeConnectorScheduler.get_num_new_matched_tokens",
            "42cf83949396",
            "trusts what we have checked",
        ),
        ("MooncakeConnectorScheduler.update_state_after_alloc", "8503f664515a", "overridden, calls the original"),
        (
            "MooncakeConnectorScheduler.build_connector_meta",
            "55bba5181b2a",
            "overridden, says whether the step computes",
        ),
        (
            "MooncakeConnectorScheduler.request_finished",
            "5e0de52bff5c",
            "overridden, adds an answer",
        ),
        (
            "MooncakeConnectorWorker.__init__",
            "0c7b9271996f",
            "overridden, as if there were a device",
        ),
        (
            "MooncakeConnectorWorker.shutdown",
            "887b246f4f7a",
            "overridden, its tasks end first",
        ),
        ("MooncakeConnectorWorker.register_worker_with_bootstrap", "d99cde60ed47", "registers with our server"),
        (
            "MooncakeConnectorWorker._mooncake_sender_listener",
            "e5060e1bae5d",
            "cancelled at the end, closes its socket",
        ),
        ("MooncakeConnectorWorker._sender_worker", "e132d80ac833", "calls our send_kv_to_decode"),
        (
            "MooncakeConnectorWorker.send_kv_to_decode",
            "555d1b499eb9",
            "overridden, its answers are read",
        ),
        ("MooncakeConnectorWorker._send_blocks", "75f2f522bebe", "replaced"),
        ("MooncakeConnectorWorker.record_send_reqs", "c1011a7f1b6d", "replaced"),
        ("MooncakeConnectorWorker.fetch_finished_sending_reqs", "9c3615340666", "frees what has expired"),
        ("MooncakeConnectorWorker.get_transfer_results", "5ba820b4f7e3", "overridden, calls the original"),
        (
            "MooncakeConnectorWorker.receive_kv_from_single_worker",
            "2e444da1ce55",
            "overridden, a task of ours",
        ),
        ("MooncakeConnectorWorker._handle_failed_recv", "e277d7e06ac4", "overridden, calls the original"),
        ("MooncakeConnectorWorker.process_pulling_result", "33bf42a782b4", "overridden, calls the original"),
        ("MooncakeConnectorWorker.handle_new_engine_id", "7a2774b0c00b", "overridden, calls the original"),
        ("MooncakeConnectorWorker.receive_kv", "fcb489c63969", "overridden, calls the original"),
        ("MooncakeConnectorWorker._start_load_kv", "3d6d20f5c0cf", "overridden, calls the original"),
        ("get_mooncake_bootstrap_addr", "ec7716ee7993", "reads the address that we put into the extra config"),
        ("should_launch_bootstrap_server", "db26610fe165", "starts none if that address is set"),
        ("SendBlockMeta", "3adbf3552717", "constructed"),
        ("PullReqMeta", "6d9802ebf6de", "read"),
    ),
    *seams_in(
        f"{_MOONCAKE}.mooncake_utils", ("MooncakeBootstrapServer", "aed2ac5ee172", "called, in the first worker")
    ),
    *seams_in(f"{_MOONCAKE}.stats", ("MooncakeKVConnectorStats", "f4241fc95841", "subclassed: one column, and sums")),
    *seams_in(
        f"{_NIXL}.connector",
        ("NixlBaseConnector.__init__", "0e9fb16a0b66", "subclassed: reads the engine id that we have made"),
        ("NixlPullConnector.__init__", "460ca28886b4", "subclassed"),
        ("NixlBaseConnector.on_new_request", "c18760a8c3e3", "overridden, calls the original"),
    ),
    *seams_in(
        f"{_NIXL}.base_scheduler",
        ("NixlBaseConnectorScheduler.__init__", "1d7747fb2b8d", "reads the port that we have put into the environment"),
    ),
    *seams_in(
        f"{_NIXL}.pull_scheduler",
        ("NixlPullConnectorScheduler.get_num_new_matched_tokens", "63bb75abd1ad", "trusts what we have checked"),
        ("NixlPullConnectorScheduler.update_state_after_alloc", "b54eaa78dc96", "trusts what we have checked"),
        ("NixlPullConnectorScheduler.request_finished", "e078aca10ca4", "makes the answer of a prefill request"),
    ),
    *seams_in(
        "vllm.distributed.kv_transfer.kv_connector.factory",
        ("KVConnectorFactory.get_connector_class", "0146491734f7", "finds our connectors by kv_connector_module_path"),
    ),
    *seams_in(
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        ("KVConnectorBase_V1.bind_kv_cache_manager", "0bebcf24637f", "gives us the block pool"),
    ),
    *seams_in(
        "vllm.v1.core.block_pool",
        ("BlockPool.touch", "68da897d0950", "called: holds blocks that may still be written to"),
        ("BlockPool.free_blocks", "918fbe26cb77", "called: lets go of them"),
    ),
    *seams_in(
        "vllm.v1.core.sched.scheduler",
        ("Scheduler._handle_failed_recving", "e37c61332da4", "computes again, in other blocks"),
        ("Scheduler._update_waiting_for_remote_kv", "c0c4856a6362", "gives the blocks of a failed transfer back"),
        ("Scheduler._update_from_kv_xfer_finished", "5cae746d845c", "brings what workers say to the connector"),
        ("Scheduler._connector_finished", "6e978f0d4028", "brings our answer into the output"),
    ),
    *seams_in(
        "vllm.v1.worker.kv_connector_model_runner_mixin",
        ("KVConnectorModelRunnerMixin._get_kv_connector_output", "a2fed64c3162", "order of our calls in a step"),
    ),
    *seams_in(
        "vllm.v1.worker.gpu_worker",
        ("Worker.get_kv_connector_handshake_metadata", "f4a3ea598a16", "brings the bootstrap address to the scheduler"),
    ),
)
