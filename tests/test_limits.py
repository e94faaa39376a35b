from dataclasses import FrozenInstanceError
from math import inf, nan

import pytest

from topr_trl import PRESETS, TruncationLimits


def test_presets_are_table_1():
    assert PRESETS["topr"] == TruncationLimits(1, 1, 0, 1)
    assert PRESETS["positives_only"] == TruncationLimits(1, 1, 0, 0)
    assert PRESETS["reinforce"] == TruncationLimits(1, 1, 1, 1)
    assert PRESETS["opr"] == TruncationLimits(0, inf, 0, inf)
    assert PRESETS["tis"] == TruncationLimits(0, 1, 0, 1)
    assert len(PRESETS) == 5


def test_which_rows_need_log_mu():
    assert (PRESETS["topr"].ratio_matters_pos, PRESETS["topr"].ratio_matters_neg) == (False, True)
    assert (PRESETS["tis"].ratio_matters_pos, PRESETS["tis"].ratio_matters_neg) == (True, True)
    assert (PRESETS["reinforce"].ratio_matters_pos, PRESETS["reinforce"].ratio_matters_neg) == (False, False)


def test_bounded_is_prop_3_2():
    assert [name for name, limits in PRESETS.items() if not limits.bounded] == ["reinforce"]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ((2, 1, 0, 1), "a_pos=2 is above"),
        ((1, 1, 0.5, 0.1), "a_neg=0.5 is above"),
        ((-1, 1, 0, 1), "a_pos=-1"),
        ((1, 1, 0, -1), "b_neg=-1"),
        ((nan, 1, 0, 1), "a_pos=nan"),
        ((1, nan, 0, 1), "b_pos=nan"),
        ((inf, inf, 0, 1), "finite"),
    ],
)
def test_bad_limits_are_named(limits, message):
    with pytest.raises(ValueError, match=message):
        TruncationLimits(*limits)


def test_a_preset_stays_what_it_is():
    with pytest.raises(FrozenInstanceError):
        PRESETS["topr"].a_neg = 1.0
