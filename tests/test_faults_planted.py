"""The list of planted faults follows the code: each fault applies, and its tests exist."""

from collections import Counter

from tests.faults_planted import ROOT, read_faults


def test_every_planted_fault_applies_to_its_file():
    faults = read_faults()
    assert [name for name, times in Counter(fault.id for fault in faults).items() if times > 1] == []
    for fault in faults:
        fault.apply(ROOT)  # raises an error that names the fault and its file


def test_the_tests_that_catch_planted_faults_exist():
    for fault in read_faults():
        assert fault.caught_by or fault.reason, f"{fault.id}: say why no test catches it"
        for test in fault.caught_by:
            file, _, name = test.partition("::")
            assert (ROOT / file).is_file(), f"{fault.id}: {file} does not exist"
            if name:
                defined = f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")
                assert defined, f"{fault.id}: {test} does not exist"
