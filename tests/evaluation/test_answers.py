from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from topr_trl.evaluation.answers import encode, read_samples, run_names, samples_of
from topr_trl.evaluation.bootstrap import compare

ROWS = {"problem_id": [3, 8, 3, 8], "extracted": ["1", "2", None, "5"], "answer": ["1", "2", "1", "2"]}


def rows(**columns):
    return Dataset.from_dict({name: values for name, values in {**ROWS, **columns}.items() if values is not None})


def test_rows_are_gathered_by_their_problem():
    samples = samples_of(rows(score=[0.1, 0.2, 0.3, 0.4], subject=["a", "b"] * 2, level=[1, None, 1, None]))
    assert list(samples.problem_ids) == [3, 8]
    assert samples.codes_PS.tolist() == [[0, -1], [0, 1]]
    assert samples.scores_PS.tolist() == [[0.1, 0.3], [0.2, 0.4]]
    assert samples.groups == {"subject": ["a", "b"], "level": ["1", "none"]}


PROMPTS = ["one " * 50 + "=", "two " * 50 + "="] * 2


def test_without_a_problem_id_rows_with_equal_prompts_share_a_problem(tmp_path):
    samples = samples_of(rows(problem_id=None, prompt=PROMPTS))
    assert samples.codes_PS.tolist() == [[0, -1], [0, 1]]
    assert [len(problem) for problem in samples.problem_ids] == [80, 80]  # Ids of long prompts are shortened.
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    assert samples_of(rows(problem_id=None, prompt=chats)).codes_PS.tolist() == [[0, -1], [0, 1]]
    assert samples_of(rows(problem_id=None, prompt=PROMPTS).with_format("numpy")).problem_ids == samples.problem_ids
    # Prompts with equal ends are different problems.
    assert samples_of(rows(problem_id=None, prompt=["a" + "=" * 90, "b" + "=" * 90] * 2)).num_problems == 2
    # `problem_id` takes precedence: rows of a problem can have different prompts.
    assert samples_of(rows(prompt=["a", "b", "c", "d"])).num_problems == 2
    rows(problem_id=None, prompt=PROMPTS).to_parquet(tmp_path / "rows.parquet")
    rows(problem_id=None, prompt=chats).to_json(tmp_path / "rows.jsonl")
    assert read_samples(tmp_path / "rows.jsonl").codes_PS.tolist() == [[0, -1], [0, 1]]
    assert read_samples(tmp_path / "rows.parquet").problem_ids == samples.problem_ids


def test_two_runs_are_compared_by_prompt(tmp_path):
    """Problems are matched by their prompts, with any order of rows, and in parquet and JSON files."""
    order = [3, 1, 2, 0]
    rows(problem_id=None, prompt=PROMPTS).select(order).to_parquet(tmp_path / "first.parquet")
    better = rows(problem_id=None, prompt=PROMPTS, extracted=["1", "2", "1", "2"])
    better.to_json(tmp_path / "second.jsonl")
    first, second = read_samples(tmp_path / "first.parquet"), read_samples(tmp_path / "second.jsonl")
    assert first.problem_ids == second.problem_ids[::-1]
    assert compare(first, second)["pass@1"].difference == 0.5
    with pytest.raises(ValueError, match="by problem_id, or by prompt"):
        compare(samples_of(rows()), second)


def test_rows_of_a_prompt_with_different_right_answers_are_named():
    wrong = rows(problem_id=None, prompt=PROMPTS, answer=["1", "2", "7", "2"])
    with pytest.raises(ValueError, match=r"same `answer`.* '….*one = \([0-9a-f]{16}\)'"):
        samples_of(wrong)
    with pytest.raises(ValueError, match=r"1 of 2 problems have fewer \(problem '….*two = .*: 1\)"):
        samples_of(rows(problem_id=None, prompt=PROMPTS).select([0, 1, 2]))


def test_the_verdict_decides_which_answers_are_right():
    """Verdicts decide, because answers to a task can have several forms. Without verdicts, the texts are compared."""
    forms = rows(extracted=["1/2", "3", "0.5", "4"], answer=["0.5", "3"] * 2, verdict=["correct", "correct"] * 2)
    assert samples_of(forms).codes_PS.tolist() == [[0, 0], [0, 0]]
    assert samples_of(forms.remove_columns("verdict")).codes_PS.tolist() == [[1, 0], [0, 1]]
    assert samples_of(rows(verdict=["invalid", "correct", "invalid", "incorrect"])).codes_PS.tolist() == [
        [-1, -1], [0, 1],
    ]  # fmt: skip
    # A judge can reject the text of the true answer, or accept a row without an extracted answer.
    odd = rows(extracted=["1", None, "1", "2"], verdict=["incorrect", "correct", "correct", "incorrect"])
    assert samples_of(odd).codes_PS.tolist() == [[1, 0], [0, 1]]


# The greedy answer to problem 3 is wrong, and the one to problem 8 is right.
GREEDY = {"problem_id": [3, 8, 3, 8, 8, 3], "extracted": ["1", "2", None, "5", "2", "7"],
          "answer": ["1", "2", "1", "2", "2", "1"], "temperature": [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]}  # fmt: skip


def test_greedy_rows_are_no_samples(tmp_path):
    samples = samples_of(rows(**GREEDY))
    assert samples.greedy_P.tolist() == [False, True]
    assert samples.codes_PS.tolist() == [[0, -1], [0, 1]]
    assert samples.num_rows == 6
    assert list(samples.temperatures) == [1.0]
    # Verdicts also decide for greedy rows. Scores of greedy rows are not used.
    more = rows(**GREEDY, verdict=["correct", "correct", "invalid", "incorrect", "invalid", "correct"],
                score=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], level=[1, 2, 1, 2, 2, 1])  # fmt: skip
    samples = samples_of(more)
    assert samples.greedy_P.tolist() == [True, False]
    assert samples.scores_PS.tolist() == [[0.1, 0.3], [0.2, 0.4]]
    assert samples.groups == {"level": ["1", "2"]}
    more.to_parquet(tmp_path / "rows.parquet")
    assert read_samples(tmp_path / "rows.parquet").greedy_P.tolist() == [True, False]
    # Without the column `temperature`, all rows are samples.
    assert samples_of(rows(**{**GREEDY, "temperature": None})).num_samples == 3


def test_rows_that_are_all_greedy_are_also_the_samples():
    samples = samples_of(rows(**GREEDY).select([4, 5]))
    assert (samples.greedy_P.tolist(), samples.codes_PS.tolist()) == ([True, False], [[0], [1]])
    assert samples.temperatures == [0.0]


def test_temperatures_of_the_samples():
    assert (samples_of(rows()).greedy_P, list(samples_of(rows()).temperatures)) == (None, [])
    assert list(samples_of(rows(temperature=[1, 0.7, 0.7000000001, 1])).temperatures) == [0.7, 1.0]
    assert list(samples_of(rows(temperature=[1.0, None, 1.0, 1.0])).temperatures) == []  # unknown for one row


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([0, 1, 2, 3, 4], r"1 of 2 problems have none .*, such as problem 3 with 0\. .*drop the column `temperature`"),
        ([0, 1, 2, 3, 4, 5, 5], r"1 of 2 problems have none or several, such as problem 3 with 2\. "),
        ([4, 4, 5, 5], "2 of 2 problems have none or several, such as problem 8 with 2"),
        ([1, 3, 4, 5], r"1 of 2 problems have fewer \(problem 3: 0\)"),
    ],
)
def test_each_problem_has_one_greedy_row_or_none_has(kept, message):
    with pytest.raises(ValueError, match=message):
        samples_of(rows(**GREEDY).select(kept))


def test_an_empty_answer_is_none():
    assert samples_of(rows(extracted=["1", "2", "", None])).codes_PS.tolist() == [[0, -1], [0, -1]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"extracted": None}, "missing: extracted"),
        ({"level": [1, 2, 3, 2]}, "same `level`"),
        ({"score": [1.0, None, 0.5, 0.5]}, "`score` .*row 1 .*None.* drop"),
        ({"score": ["1", "0.5", "0", "1"]}, "`score` .*row 0 .*'1'"),
        ({name: [] for name in ROWS}, "no row"),
        ({"extracted": [1, 2, 3, 4]}, "`extracted` .*row 0 .*1"),
        ({"answer": [1, 2, 1, 2]}, "`answer` .*row 0 .*1"),
        ({"problem_id": [[3], [8], [3], [8]]}, r"`problem_id` .*row 0 .*\[3\]"),
        ({"level": [["1"]] * 4}, r"`level` .*row 0 .*\['1'\]"),
        ({"temperature": ["1"] * 4}, "`temperature` .*row 0 .*'1' .*drop"),
        ({"verdict": ["correct", "wrong"] * 2}, "`verdict` .*row 1 .*'wrong'"),
    ],
)
def test_bad_rows(columns, message):
    with pytest.raises(ValueError, match=message):
        samples_of(rows(**columns))


def test_bad_lists():
    with pytest.raises(ValueError, match="one score for each of 1 x 2"):
        encode([["1", "2"]], ["1"], [[1.0]])
    with pytest.raises(ValueError, match="same number of samples"):
        encode([[]], ["1"])


def test_shards(tmp_path):
    for k, (start, more) in enumerate([(0, {"score": [1.0, 0.0]}), (2, {"score": [0.5, 0.5]})]):
        part = {name: values[start : start + 2] for name, values in ROWS.items()}
        pq.write_table(pa.table({**part, **more}), tmp_path / f"part-{k}.parquet")
    assert read_samples(tmp_path).scores_PS.tolist() == [[1.0, 0.5], [0.0, 0.5]]
    pq.write_table(pa.table(ROWS), tmp_path / "part-2.parquet")
    with pytest.raises(ValueError, match="only 2 of 3 files have the column 'score'"):
        read_samples(tmp_path)
    rows().to_json(tmp_path / "rows.jsonl")
    assert read_samples(tmp_path / "rows.jsonl").codes_PS.tolist() == [[0, -1], [0, 1]]
    pq.write_table(pa.table({"problem_id": [1]}), tmp_path / "bare.parquet")
    with pytest.raises(ValueError, match=r"bare.parquet: Rows to evaluate need .*; missing: answer, extracted"):
        read_samples(tmp_path / "bare.parquet")
    # One of several files lacks a column.
    (tmp_path / "mixed").mkdir()
    for name in ("a", "b"):
        table = pa.table(ROWS) if name == "a" else pa.table(ROWS).drop_columns("extracted")
        pq.write_table(table, tmp_path / "mixed" / f"{name}.parquet")
    with pytest.raises(ValueError, match=r"mixed: Rows to evaluate need .*; missing: extracted"):
        read_samples(tmp_path / "mixed")


def test_run_names(tmp_path, monkeypatch):
    assert run_names(tmp_path / "base" / "scored", tmp_path / "after" / "scored") == ["base", "after"]
    assert run_names(tmp_path / "a.jsonl", tmp_path / "b.jsonl") == ["a.jsonl", "b.jsonl"]
    assert run_names(tmp_path / "x" / "a", tmp_path / "a")[0] == "x"
    top = Path(*tmp_path.resolve().parts[:2])
    monkeypatch.chdir(top)
    assert run_names(Path("."), tmp_path.resolve() / top.name) == [top.name, tmp_path.name]
    assert run_names(Path("/b"), Path("/b/b")) == ["b", "b-b"]
    assert run_names(Path("/b/a/b"), Path("/a/b")) == ["b-a-b", "a-b"]
    with pytest.raises(ValueError, match="with itself"):
        run_names(tmp_path / "a", tmp_path / "." / "a")


@pytest.mark.parametrize(
    ("answers", "truths", "words"),
    [
        (["72", "81"], ["7", "8"], r"answers\[0\] must be a list of texts.*'72'"),
        ([["7"], ["8"]], "78", "truths must be a list of texts.*'78'"),
        ([["7"], [8]], ["7", "8"], r"answers\[1\] must be a list of texts.*8.*numbers as text"),
        ([["7"], ["8"]], ["7", None], "truths must be a list of texts.*None"),
    ],
)
def test_answers_are_texts(answers, truths, words):
    with pytest.raises(ValueError, match=words):
        encode(answers, truths)


@pytest.mark.parametrize("ids", [[1, 1], [1], [1.0, float("nan")], [None, 1]])
def test_each_problem_has_an_id_of_its_own(ids):
    with pytest.raises(ValueError, match=r"^problem_ids"):
        encode([["7"], ["8"]], ["7", "8"], problem_ids=ids)


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_rows_without_a_problem_or_prompt_are_refused(missing):
    with pytest.raises(ValueError, match=r"`problem_id`.*row 2"):
        samples_of(rows(problem_id=[3.0, 8.0, missing, missing]))
    with pytest.raises(ValueError, match=r"`prompt`: row 2 has no prompt"):
        samples_of(rows(problem_id=None, prompt=["a", "b", None, None]))
    assert samples_of(rows(level=[1.0, missing] * 2)).groups["level"] == ["1.0", "none"]
