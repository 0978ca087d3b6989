"""CPUs that this process has left count as held until Ray has freed them."""

from __future__ import annotations

import pytest

from offload.train.cluster import left


def test_cpus_that_were_left_are_free_once_every_node_that_lives_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left, "_left", [])
    left.leave({"a": 2.0, "gone": 1.0})
    left.leave({"a": 1.0})
    assert not left.are_free(lambda: {"a": 2.5, "b": 0.0})
    assert left.are_free(lambda: {"a": 2.9999, "b": 0.0})
    assert left.are_free(lambda: {"a": 0.0})  # others have them since


def test_after_some_time_others_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left, "_left", [])
    left.leave({"a": 2.0})
    monkeypatch.setattr(left, "FREED_S", 0.0)
    assert left.are_free(lambda: {"a": 0.0})
