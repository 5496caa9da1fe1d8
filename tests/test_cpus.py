"""How many CPUs there are: cores, hardware threads, efficiency cores, quotas of containers."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from octavo.system import cpus
from octavo.system.cpus import default_num_threads, num_cpus, num_physical_cores


def test_hardware_threads_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5})
    for cpu, siblings in ((0, "0,2"), (1, "1,3"), (2, "0,2")):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(siblings + "\n")
    assert num_physical_cores(tmp_path) == 3  # two cores, and one that says nothing


def test_efficiency_cores_do_not_count_beside_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpus").write_text("4-6,9\n")
    for own, count in ((range(8), 5), ({4, 5, 9}, 3), ({0, 9}, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, own=own: set(own))
        assert num_physical_cores(tmp_path, tmp_path / "cpus") == count


def test_the_least_quota_of_the_control_groups_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    membership, group = tmp_path / "membership", tmp_path / "a" / "b"
    group.mkdir(parents=True)
    membership.write_text("1:cpu:/old\n0::/a/b\n")
    assert cpus.cpu_quota(membership, tmp_path) == math.inf
    (group / "cpu.max").write_text("max 100000\n")
    assert cpus.cpu_quota(membership, tmp_path) == math.inf
    (tmp_path / "a" / "cpu.max").write_text("250000 100000\n")
    assert cpus.cpu_quota(membership, tmp_path) == 2.5
    assert cpus.cpu_quota(tmp_path / "nothing", tmp_path) == math.inf
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cpus, "num_physical_cores", lambda: 8)
    monkeypatch.setattr(cpus, "cpu_quota", lambda: 2.5)
    assert default_num_threads() == 3
    monkeypatch.setattr(cpus, "num_hardware_threads", lambda: 64)
    assert num_cpus() == 3


def test_the_usual_variable_says_how_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "cpu_quota", lambda: math.inf)
    for value, count in (("5", 5), ("0", num_physical_cores()), ("many", num_physical_cores())):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert default_num_threads() == count
