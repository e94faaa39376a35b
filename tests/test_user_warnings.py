import warnings
from dataclasses import dataclass

import torch

from topr_trl import TOPRConfig
from topr_trl.user_warnings import warn_user


@dataclass
class Derived(TOPRConfig):
    """A subclass in the code of a user."""


def test_the_line_outside_of_the_package_and_of_what_it_extends_is_named(tmp_path):
    def between(function):  # adds calls of transformers and PyTorch between the user's line and the warning
        frames = {"__name__": "transformers.trainer", "function": function}
        exec("def call(*args):\n    return function(*args)", frames)
        return torch.no_grad()(frames["call"])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", module="transformers")
        warn_user("now", FutureWarning)
        between(between(warn_user))("deep")
        TOPRConfig(str(tmp_path), use_cpu=True, bf16=False, a_neg=0.5, b_neg=1.0)
        Derived(str(tmp_path), use_cpu=True, bf16=False, a_neg=0.5, b_neg=1.0)
    assert [(w.filename, w.category) for w in caught] == [(__file__, FutureWarning)] + [(__file__, UserWarning)] * 3
    assert [w.lineno - caught[0].lineno for w in caught] == [0, 1, 2, 3]
