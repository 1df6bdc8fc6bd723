"""Attributes of other packages that are replaced while an omni process runs, in one process or for one block.

An override differs from a patch: it is made by the module that needs it, holds for the stated scope only, and is
never in a plain vLLM run. The vLLM code that an override depends on is fingerprinted as a seam. These are the core's; a
model family declares its own (`ModelFamily.overrides`).
"""

from __future__ import annotations

from vllm_omni_ext.patching.spec import Override

OVERRIDES = (
    Override(
        target="torch.distributed:init_process_group, new_group",
        where="vllm_omni_ext/engine/alone.py",
        scope="replicas that are one process, while vLLM initializes the device",
        why="vLLM makes a dozen gloo groups for a world of one; each listens on a TCP port and keeps a thread.",
        remove_when="vLLM makes no process groups for a world of one process",
    ),
    Override(
        target="vllm: CudagraphDispatcher.keys_initialized, CudaGraphManager._graphs_captured (one object)",
        where="vllm_omni_ext/engine/exported_layer.py",
        scope="one engine step that exports hidden states, where the exported layer is not compiled in",
        why="A captured graph does not return the exported layer.",
        remove_when="vLLM can run single steps outside of its CUDA graphs",
    ),
    Override(
        target="torch.accelerator:current_device_index",
        where="vllm_omni_ext/disaggregation/mooncake_connector.py",
        scope="machines without an accelerator, while vLLM's Mooncake connector is constructed",
        why="The connector asks for the device's number, which torch refuses to answer without one.",
        remove_when="vLLM's MooncakeConnector runs on CPU",
    ),
    Override(
        target="vllm.multimodal.video:VIDEO_LOADER_REGISTRY (every loader)",
        where="vllm_omni_ext/serving/video.py",
        scope="API servers",
        why="A damaged video may crash or hang its decoder; it is decoded in a process of its own.",
        remove_when="vLLM isolates video decoding",
    ),
    Override(
        target="vllm.multimodal.media:MEDIA_CONNECTOR_REGISTRY (the http connector)",
        where="vllm_omni_ext/serving/media.py",
        scope="API servers",
        why="Media are fetched from public addresses only, with limits, checked again after each redirect.",
        remove_when="vLLM checks the address that it connects to",
    ),
    Override(
        target="vllm.renderers: BaseRenderer._tokenize_prompt_async (one object)",
        where="vllm_omni_ext/serving/tokenization.py",
        scope="API servers",
        why="A text that cannot fit is refused without being tokenized to its end.",
        remove_when="vLLM bounds the characters that it tokenizes",
    ),
    Override(
        target="fastapi: routes, middleware and body validators of vLLM's application (one object)",
        where="vllm_omni_ext/serving/app.py",
        scope="API servers",
        why="Our /health and operator routes replace vLLM's; bodies are limited before they are read; validation ends "
        "at the first wrong element; an API key guards all routes.",
        remove_when="vLLM's build_app takes routers and middleware",
    ),
    Override(
        target="prometheus_client.values:ValueClass",
        where="vllm_omni_ext/metrics.py",
        scope="`vllm serve --omni`",
        why="prometheus_client chooses how values are kept when it is imported, before the directory is known.",
        remove_when="prometheus_client can change its directory after the import",
    ),
    Override(
        target="importlib loader of vllm.entrypoints.llm, torchvision.extension (two objects)",
        where="vllm_omni_ext/boot.py",
        scope="every process that imports torch; changes nothing in a plain run, except that operators which a "
        "torchvision without its extension lacks are declared",
        why="`LLM(omni=True)` needs its patch as soon as the module is there; a torchvision without its extension "
        "breaks the import of vLLM's vision models.",
        remove_when="vLLM delegates LLM(omni=True) to a plugin; torchvision declares its operators itself",
    ),
    Override(
        target="sys.modules: vllm_omni.entrypoints.cli.main (a module of that name)",
        where="vllm_omni_ext/boot.py",
        scope="`vllm serve --omni`, and only where no package of that name is installed",
        why="vLLM hands `--omni` to this function of another package; ours answers in its place.",
        remove_when="vLLM finds the omni command through an entry point",
    ),
    Override(
        target="vllm model classes: load_weights (one object)",
        where="vllm_omni_ext/engine/loading.py",
        scope="replicas, while the model is loaded",
        why="The start-up line says how many bytes of a checkpoint have been loaded.",
        remove_when="vLLM reports the progress of loading",
    ),
    Override(
        target="vllm.platforms:current_platform",
        where="vllm_omni_ext/cli/bench.py",
        scope="`vllm-omni-ext bench`, where vLLM recognises no platform",
        why="A client needs no device, but vLLM's benchmark command does not start without a platform.",
        remove_when="`vllm bench` starts without a device",
    ),
    Override(
        target="vllm.platforms: current_platform.register_triton_kernel_overrides (one object)",
        where="vllm_omni_ext/runtime/launch/inherit.py",
        scope="the process that forks replicas, while it forks them, and the forked ones",
        why="Kernels that the head has replaced are inherited; each replica would search all modules for them again.",
        remove_when="vLLM finds the references to its kernels without a search, or skips kernels replaced before",
    ),
)
