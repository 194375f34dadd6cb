"""The list of planted faults matches the code: each fault applies, and its tests exist."""

from collections import Counter

from tests.faults_planted import ROOT, read_faults


def test_every_planted_fault_applies_to_its_file():
    broken = []
    for fault in read_faults():
        try:
            fault.apply(ROOT)
        except ValueError as error:
            broken.append(str(error))
    assert broken == []


def test_every_planted_fault_has_its_own_id_and_existing_tests():
    faults = read_faults()
    counts = Counter(fault.id for fault in faults)
    assert [name for name, times in counts.items() if times > 1] == []
    for fault in faults:
        assert fault.caught_by or fault.reason, f"{fault.id}: no test catches it: set `reason`"
        for test in fault.caught_by:
            file, _, name = test.partition("::")
            path = ROOT / file
            assert path.is_file(), f"{fault.id}: {file} does not exist"
            defined = not name or f"def {name}(" in path.read_text(encoding="utf-8")
            assert defined, f"{fault.id}: {test} does not exist"
