"""The doctor: what it finds on this machine is there, and a backend is never tried for ever."""

from __future__ import annotations

import importlib.util
import sys
import time

import pytest

from planner import doctor


def test_the_solvers_and_our_packages_are_found():
    checks = {c.name: c for c in (*doctor._packages(), *doctor._solvers())}
    assert checks["our packages"].state == "ok"
    assert checks["solver HiGHS"].found == "works" or checks["solver CBC"].found == "works"


def test_without_torch_the_machine_is_healthy_and_told_what_needs_it(monkeypatch):
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "torch" else real(name))
    found = doctor.examine(1.0)
    torch = next(c for c in found.checks if c.name == "torch")
    assert torch.state == "note"
    assert found.healthy


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_an_all_reduce_that_hangs_is_ended_and_said(monkeypatch):
    monkeypatch.setattr(doctor, "ALL_REDUCE", "import time\ntime.sleep(600)\n")
    started = time.monotonic()
    check = doctor._backend("gloo", 2, 2.0)
    assert check.state == "problem"
    assert "did not end" in check.found
    assert time.monotonic() - started < 60


def test_an_all_reduce_that_fails_names_the_error(monkeypatch):
    monkeypatch.setattr(doctor, "ALL_REDUCE", "raise SystemExit('no such backend')\n")
    check = doctor._backend("gloo", 2, 30.0)
    assert check.state == "problem"
    assert "no such backend" in check.found


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_gloo_works_between_two_processes_here():
    check = doctor._backend("gloo", 2, 120.0)
    assert check.state == "ok", check.found


def test_the_examination_leaves_no_trace_of_a_user_s_folder(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise SystemExit('foreign torch')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "ALL_REDUCE", "import sys\nsys.exit(0 if '' not in sys.path else 3)\n")
    assert sys.executable
    assert doctor._backend("gloo", 1, 30.0).state == "ok"
