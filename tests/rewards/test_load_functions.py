import sys

import pytest
from trl.rewards import think_format_reward

from topr_trl.rewards.load_functions import code_fingerprint, load_reward_funcs, name_without_folder
from topr_trl.tasks.arithmetic import CARELESS_MODEL

CODE = """
from neighbor import BONUS

def short(completions, **kwargs):
    return [BONUS] * len(completions)
"""


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("importable_rewards", "neighbor"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "rewards.py").write_text(CODE)
    (tmp_path / "own" / "neighbor.py").write_text("BONUS = 2.0")
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "script.py").write_text("raise SystemExit(2)")
    (tmp_path / "importable_rewards.py").write_text("def style(completions, **kwargs):\n    return [0.5]")


def test_forms_of_names():
    short, style, same, of_trl = load_reward_funcs(
        ["own/rewards.py:short", "importable_rewards:style", "importable_rewards.style", "think_format_reward"]
    )
    assert short(["a"]) == [2.0]
    assert style(["a"]) == [0.5]
    assert same is style
    assert of_trl is think_format_reward


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("own/rewards.py:shirt", ValueError, ["own/rewards.py", "'shirt'", "short"]),
        ("own/rewards.py", ValueError, ["own/rewards.py:FUNCTION"]),
        ("nowhere.py:short", FileNotFoundError, ["nowhere.py"]),
        ("broken.py:short", ValueError, ["broken.py", "ZeroDivisionError"]),
        ("script.py:short", ValueError, ["script.py", "SystemExit"]),
        ("no_such_module:style", ValueError, ["no_such_module", "current folder"]),
        ("short", ValueError, ["'short'", "FILE.py:FUNCTION", "think_format_reward"]),
        ("nobody/no-such-model", OSError, ["nobody/no-such-model"]),
        (str(CARELESS_MODEL), ValueError, ["Qwen2ForCausalLM", "reward model"]),
    ],
)  # fmt: skip
def test_names_that_lead_nowhere(name, error, words):
    with pytest.raises(error) as caught:
        load_reward_funcs([name])
    assert "reward_funcs" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_package_that_cannot_be_imported(tmp_path):
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").write_text("1 / 0")
    for use in (code_fingerprint, load_reward_funcs):
        with pytest.raises(ValueError, match=r"module broken_package\.style of .*ZeroDivisionError"):
            use(["broken_package.style:short"])


def test_the_fingerprint_is_of_the_content(tmp_path, monkeypatch):
    names = ["own/rewards.py:short", "importable_rewards:style", "think_format_reward"]
    before = code_fingerprint(names)
    monkeypatch.chdir(tmp_path / "own")
    assert code_fingerprint(["rewards.py:short", *names[1:]]) == before
    assert name_without_folder(names[0]) == name_without_folder("rewards.py:short")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "importable_rewards.py").write_text("def style(completions, **kwargs):\n    return [0.7]")
    assert code_fingerprint(names) != before
