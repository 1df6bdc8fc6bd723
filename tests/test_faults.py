"""The table of deliberate faults fits the package."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.faults.table import ROOT, Fault, read

FAULTS = read()


def test_the_table_covers_all_packages() -> None:
    assert len(FAULTS) >= 40
    assert [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1] == []
    assert len({fault.file.rpartition("/")[0] for fault in FAULTS}) >= 15


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_its_file_and_names_tests_that_exist(fault: Fault) -> None:
    assert fault.changed((ROOT / fault.file).read_text()) != (ROOT / fault.file).read_text()
    assert fault.suite in ("quick", "test", "all") and fault.tests
    for test in fault.tests:
        file, *names = test.split("::")
        assert (ROOT / file).exists(), test
        assert all(name.partition("[")[0] in (ROOT / file).read_text() for name in names), test
