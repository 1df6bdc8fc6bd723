"""Deliberate faults: a table of small changes to the package, each with the tests that must fail when it is made."""
