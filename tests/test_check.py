"""The self-test of an installation."""

import pytest

from openmm_tensornet import check


@pytest.fixture
def reference():
    return check.read_reference()


def test_everything_passes(capsys):
    assert check.main() == 0
    lines = capsys.readouterr().out.splitlines()
    results = [line.split()[0] for line in lines[1:-1]]
    assert len(results) == 12 and set(results) <= {"passed", "missing"}
    assert lines[-1].startswith(f"12 checks: {results.count('passed')} passed, 0 failed")


def only(monkeypatch, *names):
    """Leave one back end, portable kernels and one precision."""
    backend, precision = names
    monkeypatch.setattr(check, "CHOICES", [(backend, "portable")])
    monkeypatch.setattr(check, "TOLERANCES", {precision: check.TOLERANCES[precision]})


@pytest.mark.parametrize("wrong", ["energy", "forces"])
def test_wrong_numbers_fail(monkeypatch, capsys, reference, wrong):
    only(monkeypatch, "TorchForce", "double")
    reference |= (
        {"energy": reference["energy"] + 1e-3}
        if wrong == "energy"
        else {"forces": [[0, 0, 0], *reference["forces"][1:]]}
    )
    monkeypatch.setattr(check, "read_reference", lambda: reference)
    assert check.main() == 1
    assert "\nFAILED   TorchForce, portable, double" in capsys.readouterr().out


def test_forces_that_are_not_the_gradient_fail(monkeypatch, capsys):
    """Imitated by a thermostat, which no comparison at one geometry sees."""
    only(monkeypatch, "TorchForce", "single")
    make = check.make_system

    def heated(*arguments, **options):
        import openmm

        system = make(*arguments, **options)
        system.addForce(openmm.AndersenThermostat(300, 1000))
        return system

    monkeypatch.setattr(check, "make_system", heated)
    assert check.main() == 1
    said = capsys.readouterr().out
    assert "\nFAILED   TorchForce, portable, single: constant energy" in said and "\npassed" in said


def test_what_is_missing_is_no_failure(monkeypatch, capsys):
    def missing(*_, **__):
        raise ImportError("TensorNetForce needs openmmtorch")

    monkeypatch.setattr(check, "make_system", missing)
    assert check.main() == 1
    said = capsys.readouterr().out
    assert said.count("missing  ") == 8 and said.endswith("nothing could be checked: see what is missing\n")
