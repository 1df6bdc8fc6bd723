"""What a patch and a seam are: plain data, so that both can be checked and printed without touching vLLM.

IncompatibleVllm
 |- VersionOutOfRange   never tested with the installed vLLM
 |- TargetMissing       vLLM has no attribute of that name any more
 |- TargetDrifted       the attribute is there, but its code is not the one we were written against
 |- PatchConflict       somebody else replaced the attribute, or two of our patches claim it
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
    """vLLM has no attribute of that name any more."""


class TargetDrifted(IncompatibleVllm):
    """The attribute is there, but its code is not the one we were written against."""


class PatchConflict(IncompatibleVllm):
    """Somebody else replaced the attribute, or two of our patches claim it."""


When: TypeAlias = Literal["omni", "import", "secret"]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One change to one vLLM attribute.

    Attributes:
        name: short and unique; also the name of its file, and what VLLM_OMNI_EXT_ALLOW_DRIFT takes.
        target: e.g. "vllm.entrypoints.llm:LLM.__init__".
        vllm: PEP 440 range the patch was tested with.
        why: what is not possible without it.
        upstream: address of the issue or pull request, or "none: <reason>".
        remove_when: what must be true before it can go.
        seen: fingerprints of the originals it was written against.
        wrap: original -> replacement.
        when: "omni" is put in place by `apply_all` when omni is active; "import" by the start-up hook as soon as
            vLLM imports the module, in a plain run too, and must therefore change nothing there; "secret" by
            `apply_all` in the process of a replica that knows the cluster's secret.
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
    """One vLLM symbol we subclass, call or imitate without changing it.

    Attributes:
        target: e.g. "vllm.v1.engine.utils:launch_core_engines"; what VLLM_OMNI_EXT_ALLOW_DRIFT takes as name.
        use: how we depend on it.
        seen: fingerprints of the code we were tested with.
        vllm: PEP 440 range of vLLM versions that have it.
    """

    target: str
    use: str
    seen: frozenset[str]
    vllm: str = TESTED_VLLM

    @property
    def name(self) -> str:
        """Name in messages and in VLLM_OMNI_EXT_ALLOW_DRIFT."""
        return self.target


def split_target(target: str) -> tuple[str, str]:
    """ "pkg.mod:Class.method" -> ("pkg.mod", "Class.method")."""
    module, _, qualname = target.partition(":")
    return module, qualname


def seams_in(module: str, *rows: tuple[str, str, str]) -> tuple[Seam, ...]:
    """Seams of one module; rows are (qualified name, fingerprint, how we depend on it)."""
    return tuple(Seam(target=f"{module}:{name}", seen=frozenset({seen}), use=use) for name, seen, use in rows)
