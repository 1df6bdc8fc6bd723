"""Grammars without a sentence are refused."""

from __future__ import annotations

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from vllm_omni_ext.grammars import empty_rules, refuse_empty_grammar

EMPTY = [
    "root ::= root",
    'root ::= "a" b\nb ::= b',
    'root ::= root "a" | "b" root',
    'root ::= a | b "x"\na ::= b "y"\nb ::= a+',
    'root ::= "a" b{2,3}\nb ::= "x" b',
    'root ::= "a ::= " b\nb ::= b "| c"',
]
FINE = [
    'root ::= root "a" | "b"',
    'root ::= ("" | root) "a"',
    'root ::= "a" b*\nb ::= b',
    'root ::= "a" b{0,3}\nb ::= b "root"',
    'root ::= a{2,3} b? [^|"b] (a | b)\na ::= [0-9]+ "| b"\nb ::= "q" (=a)',
    'root ::= "(" root ")" | "x"',
    'start: "a" | "b"',
    "not a grammar",
]


@pytest.mark.parametrize("grammar", EMPTY)
def test_a_grammar_that_never_ends_is_refused(grammar: str) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(grammar=grammar))
    with pytest.raises(VLLMValidationError, match="never ends") as caught:
        refuse_empty_grammar(params)
    assert caught.value.parameter == "structured_outputs.grammar"


@pytest.mark.parametrize("grammar", FINE)
def test_other_grammars_are_accepted(grammar: str) -> None:
    refuse_empty_grammar(SamplingParams(structured_outputs=StructuredOutputsParams(grammar=grammar)))
    refuse_empty_grammar(SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+")))
    refuse_empty_grammar(SamplingParams())


def test_long_chains_of_rules_are_searched() -> None:
    rules = [f'r{number} ::= "a" r{number + 1}' for number in range(3000)]
    assert empty_rules("\n".join(["root ::= r0", *rules, 'r3000 ::= "b"'])) == []
    assert "root" in empty_rules("\n".join(["root ::= r0", *rules, "r3000 ::= r0"]))
