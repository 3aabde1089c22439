"""Whether a package is there: installed ones, stubs in sys.modules, and what must not be imported."""

import sys
import types

import pytest

from gbmoe._importable import is_importable


def test_what_is_installed_and_what_is_not():
    assert is_importable("torch") and is_importable("wave") and not is_importable("gbmoe_nothing")


@pytest.mark.parametrize("stub", [types.ModuleType("gbmoe_nothing"), types.SimpleNamespace()], ids=["no spec", "no attribute"])
def test_a_stub_without_a_spec_is_importable(stub, monkeypatch):
    monkeypatch.setitem(sys.modules, "gbmoe_nothing", stub)
    assert is_importable("gbmoe_nothing")


def test_none_in_the_table_of_modules_hides_an_installed_one(monkeypatch):
    monkeypatch.setitem(sys.modules, "wave", None)
    assert not is_importable("wave")
