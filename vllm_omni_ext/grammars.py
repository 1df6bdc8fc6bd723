"""Refuses grammars that match no text, such as `root ::= root`.

vLLM accepts such grammars because they parse. A stage with such a grammar has no allowed token, and its request fails
during generation with a server error.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

FIELD = "structured_outputs.grammar"
START = "root"

_TERMINALS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]')
_LOOK_AHEAD = re.compile(r" \(=.*$")
_NEEDED = re.compile(r"[A-Za-z_][\w.-]*(?!\{0)(?![\w.({-])|[A-Za-z_][\w.-]*(?=\{[1-9])")
_MACRO = re.compile(r"[A-Za-z_]\w*\(")


def refuse_empty_grammar(params: SamplingParams) -> None:
    """Raise VLLMValidationError (HTTP 400) if the request has a grammar that matches no text."""
    given = getattr(params, "structured_outputs", None)
    if given is None or not given.grammar:
        return
    if START in empty_rules(given.grammar):
        raise VLLMValidationError(f"{FIELD}: no text can follow it: rule '{START}' never ends", parameter=FIELD)


def empty_rules(grammar: str) -> list[str]:
    """Return the names of the rules that match no text.

    Args:
        grammar: EBNF or Lark. If it does not parse, the result is empty, because vLLM reports that error.
    """
    import xgrammar
    from vllm.v1.structured_output.utils import grammar_is_likely_lark

    read = xgrammar.Grammar.from_lark if grammar_is_likely_lark(grammar) else xgrammar.Grammar.from_ebnf
    try:
        rules = dict(line.split(" ::= ", 1) for line in str(read(grammar)).splitlines() if " ::= " in line)
    except Exception:  # xgrammar raises errors of all kinds, from C++
        return []
    missing: dict[int, int] = {}
    waiting: dict[str, list[tuple[int, str]]] = defaultdict(list)
    ended = []
    for number, (rule, needed) in enumerate(_choices(rules)):
        missing[number] = len(needed)
        for each in needed:
            waiting[each].append((number, rule))
        if not needed:
            ended.append(rule)
    known: set[str] = set()
    while ended:
        rule = ended.pop()
        if rule in known:
            continue
        known.add(rule)
        for number, other in waiting[rule]:
            missing[number] -= 1
            if not missing[number]:
                ended.append(other)
    return [rule for rule in rules if rule not in known]


def _choices(rules: dict[str, str]) -> Iterator[tuple[str, set[str]]]:
    """Yield (rule name, names of the rules that a match of the alternative requires) for each alternative of each rule.

    Args:
        rules: rule name -> body, as xgrammar prints them.
    """
    for rule, body in rules.items():
        plain = _LOOK_AHEAD.sub("", _TERMINALS.sub("", body))
        if _MACRO.search(plain):  # a macro is assumed to match some text
            yield rule, set()
            continue
        for choice in plain.split("|"):
            yield rule, {name for name in _NEEDED.findall(choice) if name in rules}
