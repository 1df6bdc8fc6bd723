"""Definitions of patch and seam: plain data, so that both can be checked and printed without touching vLLM.

IncompatibleVllm
 |- VersionOutOfRange   never tested with the installed vLLM
 |- TargetMissing       vLLM no longer has an attribute of that name
 |- TargetDrifted       the attribute exists, but its code is not the code it was written against
 |- PatchConflict       another package replaced the attribute, or two of our patches claim it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from vllm_omni_ext.errors import IncompatibleVllm

TESTED_VLLM = ">=0.32,<0.33"
"""PEP 440 range of vLLM versions this package was tested with."""


class VersionOutOfRange(IncompatibleVllm):
    """The installed vLLM is outside the tested range."""


class TargetMissing(IncompatibleVllm):
    """vLLM no longer has an attribute of that name."""


class TargetDrifted(IncompatibleVllm):
    """The attribute exists, but its code is not the code that the patch or seam was written against."""


class PatchConflict(IncompatibleVllm):
    """Another package replaced the attribute, or two of our patches claim it."""


When: TypeAlias = Literal["omni", "import", "secret"]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One change to one vLLM attribute.

    Attributes:
        name: short and unique; also the name of its file, and its name in VLLM_OMNI_EXT_ALLOW_DRIFT.
        target: e.g. "vllm.entrypoints.llm:LLM.__init__".
        vllm: PEP 440 range the patch was tested with.
        why: the feature that is impossible without the patch.
        upstream: address of the issue or pull request, or "none: <reason>".
        remove_when: condition under which the patch can be removed.
        seen: fingerprints of the originals that the patch was written against.
        wrap: original -> replacement.
        when: "omni": applied by `apply_all` when omni is active. "import": applied by the start-up hook as soon as vLLM
            imports the module, in a plain run too, and must therefore change nothing there. "secret": applied by
            `apply_all` in the process of a replica that has the cluster secret.
    """

    name: str
    target: str
    why: str
    upstream: str
    remove_when: str
    seen: frozenset[str]
    wrap: Callable[[Any], Any]
    vllm: str = TESTED_VLLM
    when: When = "omni"


@dataclass(frozen=True, kw_only=True)
class Seam:
    """One vLLM symbol that this package subclasses, calls or imitates without changing it.

    Attributes:
        target: e.g. "vllm.v1.engine.utils:launch_core_engines"; also its name in VLLM_OMNI_EXT_ALLOW_DRIFT.
        use: how this package depends on it.
        seen: fingerprints of the tested code.
        vllm: PEP 440 range of vLLM versions that have the symbol.
    """

    target: str
    use: str
    seen: frozenset[str]
    vllm: str = TESTED_VLLM

    @property
    def name(self) -> str:
        """Name in messages and in VLLM_OMNI_EXT_ALLOW_DRIFT."""
        return self.target


@dataclass(frozen=True, kw_only=True)
class Override:
    """One attribute of another package that is replaced at run time, in a stated scope.

    Attributes:
        target: the replaced attribute, for a reader.
        where: the file that replaces it.
        scope: the processes, and the duration.
        why: the feature that is impossible without the override.
        remove_when: condition under which the override can be removed.
    """

    target: str
    where: str
    scope: str
    why: str
    remove_when: str


def split_target(target: str) -> tuple[str, str]:
    """ "pkg.mod:Class.method" -> ("pkg.mod", "Class.method")."""
    module, _, qualname = target.partition(":")
    return module, qualname


def seams_in(module: str, *rows: tuple[str, str, str]) -> tuple[Seam, ...]:
    """Seams of one module; rows are (qualified name, fingerprint, how this package depends on it)."""
    return tuple(Seam(target=f"{module}:{name}", seen=frozenset({seen}), use=use) for name, seen, use in rows)
