import numpy as np
import pytest
from datasets import Dataset

from topr_trl.data.rows import (
    check_finish_reasons,
    checked_column,
    finite_rewards,
    order_column,
    problem_column,
    reward_column,
    text_column,
)
from topr_trl.data.tables import load_rows


def rows_with(**columns):
    return Dataset.from_dict(columns)


def test_the_error_names_column_first_wrong_row_value_and_remedy():
    rows = rows_with(size=[1, -2, 3, -4])
    assert checked_column(rows, "size", lambda value: value > -9, "sizes") == [1, -2, 3, -4]
    with pytest.raises(ValueError, match=r"`size` .*positive sizes.* row 1 .*-2 .*first of 2.*Drop them\."):
        checked_column(rows, "size", lambda value: value > 0, "positive sizes", "Drop them.")
    with pytest.raises(ValueError, match=r"row 3 .*-4.* drop such rows"):
        checked_column(rows, "size", lambda value: value > -4, "sizes")


def test_values_are_python_objects_whatever_the_format_of_the_rows():
    rows = rows_with(answer=["a", "b"], reward=[1.0, 0.0], label=[True, False]).with_format("numpy")
    assert text_column(rows, "answer") == ["a", "b"]
    assert finite_rewards(rows).tolist() == [1.0, 0.0]


def test_text():
    rows = rows_with(answer=["a", None])
    assert text_column(rows, "answer", may_be_empty=True) == ["a", None]
    with pytest.raises(ValueError, match=r"`answer` .*row 1 .*None"):
        text_column(rows, "answer")
    with pytest.raises(ValueError, match=r"`answer` .*row 0 .*4 .*cast_column"):
        text_column(rows_with(answer=[4, 5]), "answer", may_be_empty=True)


def test_rewards_come_from_reward_or_label():
    texts = {"prompt": ["p"] * 3, "completion": ["c"] * 3}
    assert reward_column(rows_with(**texts, reward=[1, 0, -1])).tolist() == [1.0, 0.0, -1.0]
    labelled = reward_column(rows_with(**texts, label=[True, False, True]))
    assert labelled.dtype == np.float64
    assert labelled.tolist() == [1.0, -1.0, 1.0]


@pytest.mark.parametrize("name", ["reward", "label"])
def test_words_instead_of_rewards_are_an_error_that_tells_how_to_read_them(name):
    rows = rows_with(prompt=["p"] * 2, completion=["c"] * 2, **{name: ["good", "bad"]})
    with pytest.raises(ValueError, match=rf"(?s)`{name}`.*'good'.*--label_values good=1 bad=-1"):
        reward_column(rows)


@pytest.mark.parametrize(
    ("columns", "hints"),
    [
        (["promt", "completion", "reward"], ["'promt' meant to be 'prompt'"]),
        (
            ["prompt", "completions", "rewrd"],
            ["'completions' meant to be 'completion'", "'rewrd' meant to be 'reward'"],
        ),
    ],
)
def test_a_misspelled_column_is_named_with_remedies_for_commands_and_scripts(columns, hints):
    with pytest.raises(ValueError, match=r"(?s)found.*--prompt_field, --completion_field, --reward_fields") as caught:
        reward_column(rows_with(**{name: ["a"] for name in columns}))
    assert "rename_column" in str(caught.value)
    assert str(caught.value).count("meant to be") == len(hints)
    assert all(hint in str(caught.value) for hint in hints)


def test_groups():
    rows = rows_with(prompt=["a", "b", "a"], problem_id=[7, 7, 8])
    assert problem_column(rows).tolist() == [7, 7, 8]
    by_prompt = problem_column(rows.remove_columns("problem_id"))
    assert by_prompt[0] == by_prompt[2] != by_prompt[1]
    by_ids = problem_column(rows_with(prompt=[""] * 3, prompt_ids=[[1, 2], [3], [1, 2]]))
    assert by_ids[0] == by_ids[2] != by_ids[1]
    assert problem_column(rows_with(prompt=["a", "b"], prompt_ids=[[1], None]))[1] == by_prompt[1]


def test_one_long_id_does_not_multiply_the_memory():
    ids = ["x" * 1_000_000, "b", "b"] * 100
    problems = problem_column(rows_with(prompt=["a"] * 300, problem_id=ids))
    assert problems.tolist() == ids
    assert problems.nbytes < 10_000


def test_ids_are_all_text_or_all_numbers(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "problem_id": 1}\n{"prompt": "b", "problem_id": "1"}')
    with pytest.raises(ValueError, match=r"`problem_id` holds text and numbers.* all as text"):
        problem_column(load_rows(path))


@pytest.mark.parametrize("name", ["truncated", "is_truncated"])
def test_rows_that_may_be_cut_need_a_finish_reason(name):
    cut = {name: [False, None, True]}
    with pytest.raises(ValueError, match=rf"`{name}` is true in row 2.* `length` .* `stop`"):
        check_finish_reasons(rows_with(**cut))
    check_finish_reasons(rows_with(**cut, finish_reason=[None, "stop", "length"]))
    check_finish_reasons(rows_with(**cut, finish_reason=[None, None, "stop"]))
    check_finish_reasons(rows_with(prompt=["a"]))


@pytest.mark.parametrize("form", ["torch", "numpy"])
def test_problems_are_those_of_the_rows_whatever_their_format(form):
    long = [list(range(2_000)), [*range(1_000), 7, *range(1_001, 2_000)]]
    rows = Dataset.from_dict({"prompt": ["", ""], "prompt_ids": long})
    found = problem_column(rows.with_format(form))
    assert found[0] != found[1]
    assert (found == problem_column(rows)).all()


def test_a_missing_prompt_is_no_problem_of_its_own():
    with pytest.raises(ValueError, match=r"`prompt`: row 1 has no prompt.*problem_id"):
        problem_column(rows_with(prompt=["a", None, None]))
    rows = rows_with(prompt=[None, None], prompt_ids=[[1], [2]])
    assert len(set(problem_column(rows))) == 2


@pytest.mark.parametrize("ids", [["10", "9"], [0.0, float("nan")], [0, None]])
def test_rows_are_ordered_by_numbers(ids):
    with pytest.raises(ValueError, match=r"`sample_id` must hold numbers"):
        order_column(rows_with(sample_id=ids), "sample_id")
