import importlib
import sys
from importlib.util import find_spec

import pytest

import topr_trl
from topr_trl.renamed import FUNCTIONS, MODULES


@pytest.mark.parametrize("old", sorted(FUNCTIONS))
def test_functions_of_version_0_1_work_and_name_the_new_ones(old):
    with pytest.warns(FutureWarning, match=f"topr_trl.{old} is called {FUNCTIONS[old]} now"):
        assert getattr(topr_trl, old) is getattr(topr_trl, FUNCTIONS[old])
    assert old not in topr_trl.__all__


@pytest.mark.parametrize("old", sorted(MODULES))
def test_modules_of_version_0_1_say_where_they_are(old):
    with pytest.raises(ModuleNotFoundError, match=rf"topr_trl\.{old} is topr_trl\."):
        importlib.import_module(f"topr_trl.{old}")
    if "." not in old:
        with pytest.raises(ModuleNotFoundError, match=rf"topr_trl\.{old} is topr_trl\."):
            getattr(topr_trl, old)
    for new in f"topr_trl.{MODULES[old]}".split(" and "):
        assert find_spec(new) is not None


def test_what_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'topr_trl\.nothing'"):
        importlib.import_module("topr_trl.nothing")
    assert not hasattr(topr_trl, "nothing")
    assert "topr_trl.candidates" not in sys.modules
