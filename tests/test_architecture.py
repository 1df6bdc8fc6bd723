"""Rules of the layout, read from the syntax trees: allowed imports, no swallowed errors, no polling."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = "vllm_omni_ext"
MAPPED = ("patches", "model_plugins", "stage_configs")

HEAVY = {"vllm", "torch", "zmq", "transformers", "mooncake"}

MEMBERSHIP = (
    "coordinator.members",
    "coordinator.membership",
)
"""The part of the coordinator that does no I/O."""

_DECIDING = ("messages", "state", "placement", "router", "machine")
MACHINE = (*(f"orchestrator.{name}" for name in _DECIDING), "observability.request_trace")
"""The part of the orchestrator that decides, and the record of a request that it passes on."""

LAYERS = (
    {"encoding", "errors", "ids", "lifeline", "memory", "ports", "titles", "tiny.directory"},
    {"batch", "patching", "patches", "evaluation", "vllm_hooks"},
    {"config", "compat", "environment", "metrics", "modalities", "plugin", "plugins", "model_plugins.*.family"}
    | {"connectors.base", "connectors.registry", "resampling"},
    {"topology", "pool", *MACHINE, "disaggregation.parameters", *MEMBERSHIP},
    {"wire", "connectors", "observability"},
    {"coordinator", "disaggregation", "orchestrator", "engine", "model_plugins"},
    {"runtime", "omni", "grammars"},
    {"serving", "cli", "loadtest", "doctor", "llm", "llm_arguments", "boot", "tiny", "testing"}
    | {"__main__", "__init__"},
)
"""Lowest first; a module may import its own layer and those below. The longest matching name counts."""

PURE = (
    "encoding",
    "errors",
    "ids",
    "ports",
    "batch",
    "config",
    "topology",
    "pool",
    *MACHINE,
    "disaggregation.parameters",
    "disaggregation.pending_transfers",
    *MEMBERSHIP,
    "patching",
    "loadtest",
    "serving.realtime.client_secrets",
    "serving.realtime.conversation",
    "serving.realtime.events",
    "serving.realtime.limits",
    "serving.realtime.onnx",
    "serving.realtime.pacing",
    "serving.realtime.pcm",
    "serving.realtime.response",
    "serving.realtime.session",
    "serving.realtime.settings",
    "serving.realtime.sound",
    "serving.realtime.turns",
    "serving.realtime.vad",
)
"""Modules that must not import anything heavy, not even inside a function."""

LIGHT_AT_THE_TOP = (
    *PURE,
    "compat",
    "environment",
    "doctor",
    "boot",
    "plugin",
    "patches",
    "plugins.spec",
    "plugins.registry",
    "connectors.arena",
    "connectors.base",
    "connectors.chunks",
    "connectors.registry",
    "serving.realtime.smart_turn",
    "cli.main",
)
"""Modules that are imported in plain runs or for --help: nothing heavy at their top."""

FORBIDDEN = {
    "model_plugins": ("topology", "runtime", "pool", "cli", "serving"),
    "patches": (
        "config",
        "topology",
        "runtime",
        "pool",
        "wire",
        "connectors",
        "engine",
        "orchestrator",
        "serving",
        "cli",
    ),
    "disaggregation": ("config", "topology", "runtime", "pool", "orchestrator", "serving", "cli"),
    "engine": ("runtime", "pool", "orchestrator", "serving", "cli"),
    "orchestrator": ("runtime", "engine", "serving", "cli"),
    "loadtest": ("evaluation",),  # needs the extra `eval`
    "cli.bench_speech": ("evaluation", "cli.eval"),
}
"""On top of the layers."""

ALLOWED = {("engine", "pool.load")}
"""The load that a replica reports."""

LAZY = {("patches.llm_omni_keyword", "compat"), ("patches.llm_omni_keyword", "llm"), ("boot", "cli.main")}
"""Imports inside a function that run only with omni: (importer, imported)."""


@dataclass(frozen=True)
class Module:
    """One source file."""

    file: Path
    name: str
    tree: ast.Module


@dataclass(frozen=True)
class Import:
    """One imported module; `nested` if inside a function."""

    name: str
    nested: bool


@cache
def modules() -> tuple[Module, ...]:
    """All modules of the package, named without the package's own name."""
    return tuple(_read(file) for top in (OURS, *MAPPED) for file in sorted((ROOT / top).rglob("*.py")))


def _read(file: Path) -> Module:
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == OURS else parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
    return Module(file, name, ast.parse(file.read_text()))


@cache
def imports(module: Module) -> tuple[Import, ...]:
    """All imports of a module that run; those under `if TYPE_CHECKING` do not run."""
    return tuple(_imports(module.tree, nested=False))


def _imports(node: ast.AST, *, nested: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, nested) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (Import(f"{child.module}.{alias.name}", nested) for alias in child.names)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        else:
            inside = nested or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, nested=inside)


def ours(module: Module) -> Iterator[tuple[str, bool]]:
    """Imports of our own modules: (module name without the package, nested)."""
    known = {other.name for other in modules()}
    for found in imports(module):
        if found.name.partition(".")[0] == OURS:
            name = found.name.removeprefix(OURS).removeprefix(".")
            while name and name not in known:
                name = name.rpartition(".")[0]
            yield name or "__init__", found.nested


def matches(name: str, pattern: str) -> bool:
    """True if `name` is `pattern` or inside it; `*` stands for one part."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) >= len(wanted) and all(w in (p, "*") for p, w in zip(parts, wanted, strict=False))


def layer(name: str) -> int:
    """Number of the layer a module is in."""
    found = [(pattern.count("."), at) for at, group in enumerate(LAYERS) for pattern in group if matches(name, pattern)]
    assert found, f"{name} is in no layer; add it to LAYERS"
    return max(found)[1]


def every(module: Module, kinds: type | tuple[type, ...]) -> Iterator[ast.AST]:
    return (node for node in ast.walk(module.tree) if isinstance(node, kinds))


def where(module: Module, node: ast.AST) -> str:
    return f"{module.file.relative_to(ROOT)}:{node.lineno}"


@pytest.mark.slow
def test_a_module_imports_only_its_own_layer_and_lower_ones():
    wrong = [
        f"{module.name} (layer {layer(module.name)}) imports {name} (layer {layer(name)})"
        for module in modules()
        for name, nested in ours(module)
        if name != "__init__" and layer(name) > layer(module.name) and not (nested and (module.name, name) in LAZY)
    ]
    assert wrong == []


@pytest.mark.parametrize("package", FORBIDDEN)
def test_forbidden_imports(package):
    wrong = [
        f"{module.name} imports {name}"
        for module in modules()
        if matches(module.name, package)
        for name, nested in ours(module)
        if any(matches(name, other) for other in FORBIDDEN[package]) and (package, name) not in ALLOWED
    ]
    assert wrong == []


def test_pure_modules_import_nothing_heavy():
    assert heavy(PURE, nested_too=True) == []


def test_light_modules_import_nothing_heavy_at_their_top():
    assert heavy(LIGHT_AT_THE_TOP, nested_too=False) == []


def heavy(patterns: tuple[str, ...], *, nested_too: bool) -> list[str]:
    return [
        f"{module.name} imports {found.name}"
        for module in modules()
        if any(matches(module.name, pattern) for pattern in patterns)
        for found in imports(module)
        if found.name.partition(".")[0] in HEAVY and (nested_too or not found.nested)
    ]


def test_mapped_folders_are_imported_by_their_full_name():
    wrong = [
        f"{module.name} imports {found.name}"
        for module in modules()
        for found in imports(module)
        if found.name.partition(".")[0] in MAPPED
    ]
    assert wrong == []


def test_no_error_is_swallowed():
    """A broad handler must do something: raise, log and count, or turn the error into an event."""
    wrong = [
        where(module, node)
        for module in modules()
        for node in every(module, ast.ExceptHandler)
        if is_broad(node) and all(isinstance(step, ast.Pass | ast.Continue) or is_ellipsis(step) for step in node.body)
    ]
    assert wrong == []


def is_broad(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or bool(
        {"Exception", "BaseException"} & set(ast.unparse(handler.type).strip("()").split(", "))
    )


def is_ellipsis(step: ast.stmt) -> bool:
    return isinstance(step, ast.Expr) and isinstance(step.value, ast.Constant) and step.value.value is ...


def test_nothing_polls():
    """`sleep(<less than a tenth of a second>)` is a polling loop in disguise."""
    wrong = [
        where(module, node)
        for module in modules()
        for node in every(module, ast.Call)
        if ast.unparse(node.func).rpartition(".")[2] == "sleep"
        and any(isinstance(arg, ast.Constant) and 0 < float(arg.value) < 0.1 for arg in node.args)
    ]
    assert wrong == []


def test_the_helpers_find_violations_of_rules():
    tree = ast.parse("import torch\ndef f():\n    from vllm_omni_ext.cli import main\n    sleep(0.01)\n")
    module = Module(Path("x.py"), "config.x", tree)
    assert imports(module) == (Import("torch", False), Import("vllm_omni_ext.cli.main", True))
    assert list(ours(module)) == [("cli.main", True)]
    assert layer("cli.main") > layer("config.x")
    assert layer("orchestrator.machine") < layer("orchestrator.orchestrator")
    assert layer("model_plugins.bagel.family") < layer("model_plugins.bagel.dit")
