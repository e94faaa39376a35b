import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from topr_trl import load_rows
from topr_trl.cli.main import main
from topr_trl.pipeline import manifest
from topr_trl.pipeline.stages import sample
from topr_trl.pipeline.stages.evaluate import Evaluate
from topr_trl.pipeline.stages.sample import Sample
from topr_trl.pipeline.stages.score import Score

pytestmark = pytest.mark.slow

# Two problems with four samples each. Three samples of the first are right, and one of the second.
ROWS = {
    "problem_id": [0] * 4 + [1] * 4,
    "completion": [f"The answer is {n}." for n in (5, 5, 5, 1, 2, 3, 3)] + ["I do not know."],
    "answer": ["5"] * 4 + ["2"] * 4,
    "level": [1] * 4 + [2] * 4,
}


def write(path, **columns):
    table = {name: values for name, values in {**ROWS, **columns}.items() if values is not None}
    pq.write_table(pa.table(table), path)
    return str(path)


def run(*arguments):
    main(["evaluate", *map(str, arguments), "--use_cpu", "true"])


def fails(*arguments):
    with pytest.raises((ValueError, OSError)) as error:
        run(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


MODEL = ["--num_test_problems", 3, "--num_shots", 0, "--num_generations_eval", 4, "--max_new_tokens", 60, "--seed", 3]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    """Return the folder of an evaluation of the bundled model by one command."""
    out = tmp_path_factory.mktemp("embedded") / "out"
    run(*MODEL, "--output_dir", out)
    return out


def test_stored_rows_and_a_model_are_refused(tmp_path):
    found = fails("--input", write(tmp_path / "rows.parquet"), "--model_name_or_path", "me/x")
    assert all(word in found for word in ("--input", "--model_name_or_path", "Remove"))


def test_a_model(embedded, capsys, monkeypatch):
    assert {path.name for path in embedded.iterdir()} >= {
        "rollouts", "evaluation.json", "evaluation.png", "evaluation.txt", "_manifest.json",
    }  # fmt: skip
    found = json.loads((embedded / "evaluation.json").read_text())
    assert (found["num_problems"], found["num_samples"]) == (3, 4)
    assert list(found["pass_at"]) == ["1", "2", "4"]
    rows = load_rows(embedded / "rollouts")
    verdicts = [[], []]  # verdicts of the samples, then of the greedy completions
    for verdict, temperature in zip(rows["verdict"], rows["temperature"], strict=True):
        verdicts[temperature == 0].append(verdict)
    assert list(map(len, verdicts)) == [12, 3]
    assert found["shares"]["correct"] == pytest.approx(verdicts[0].count("correct") / 12)
    assert found["greedy"]["value"] == pytest.approx(verdicts[1].count("correct") / 3)
    assert found["temperatures"] == [1.0]
    assert manifest.read(embedded).stages["evaluate"]["rows"] == 15
    # The rows have their own manifest. A second run reads the finished evaluation, and needs no sampler.
    assert all("/" not in name for name in manifest.read(embedded).files)
    monkeypatch.setattr(sample, "_sampler", None)
    run(*MODEL, "--output_dir", embedded)
    said = capsys.readouterr().out
    assert "pass@4" in said
    assert "greedy (T=0)" in said
    assert "4 samples each at T=1;" in said


def test_without_greedy_completions(embedded, tmp_path, capsys):
    run(*MODEL, "--greedy", "false", "--temperature", 0.7, "--output_dir", tmp_path / "out")
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert (found["greedy"], found["temperatures"]) == (None, [0.7])
    said = capsys.readouterr().out
    assert "4 samples each at T=0.7;" in said
    assert "greedy (T=0)" not in said
    assert "greedy: False there, True now" in fails(*MODEL, "--temperature", 0.7, "--output_dir", tmp_path / "out")


def test_a_killed_evaluation_goes_on(embedded, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Score, "make", None)
        with pytest.raises(TypeError):
            run(*MODEL, "--output_dir", tmp_path)
    monkeypatch.setattr(sample, "_sampler", None)  # The first run has already sampled.
    run(*MODEL, "--output_dir", tmp_path)
    assert (tmp_path / "evaluation.json").read_text() == (embedded / "evaluation.json").read_text()


def test_changed_reward_functions_are_refused(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "2 + 3 ="}\n')
    functions = "def {}(completions, **kwargs):\n    return [{}] * len(completions)\n"
    (tmp_path / "own.py").write_text(functions.format("one", 1.0) + functions.format("two", 2.0))
    more = ["--test_dataset_name", tmp_path / "prompts.jsonl", "--num_generations_eval", 2, "--max_new_tokens", 4,
            "--output_dir", tmp_path / "out", "--reward_funcs"]  # fmt: skip
    run(*more, f"{tmp_path}/own.py:one")
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["reward"]["value"] == 1.0
    said = fails(*more, f"{tmp_path}/own.py:two")
    assert "reward_funcs" in said
    assert "output_dir" in said


def test_candidates_are_scored_where_they_are_not(tmp_path, capsys):
    run("--input", write(tmp_path / "rows.parquet"), "--output_dir", tmp_path / "out")
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    # pass@1: (3/4 + 1/4) / 2. pass@2: two of four samples always include one of three right ones, and include a single
    # right one half of the time.
    assert found["pass_at"]["1"]["value"] == 0.5
    assert found["pass_at"]["2"]["value"] == pytest.approx((1 + 1 / 2) / 2)
    assert found["shares"] == {"correct": 0.5, "incorrect": 0.375, "invalid": 0.125}
    assert found["cardinality"] == [0, 1, 0, 1, 0]
    assert {name: group["pass_at_1"]["value"] for name, group in found["groups"]["level"].items()} == {
        "1": 0.75, "2": 0.25,
    }  # fmt: skip
    assert "level" in capsys.readouterr().out
    run("--input", tmp_path / "out" / "scored", "--output_dir", tmp_path / "again")
    assert not (tmp_path / "again" / "scored").exists()
    assert json.loads((tmp_path / "again" / "evaluation.json").read_text()) == found


def test_two_runs(tmp_path, capsys):
    first = write(tmp_path / "first.parquet")
    better = write(tmp_path / "better.parquet", completion=["The answer is 5."] * 4 + ["The answer is 2."] * 4)
    run("--input", first, "--compare", better, "--output_dir", tmp_path / "out")
    found = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert list(found["runs"]) == ["first.parquet", "better.parquet"]
    assert found["differences"]["pass@1"]["difference"] == 0.5
    assert found["differences"]["pass@1"]["share_better"] == 1.0
    assert "better.parquet minus first.parquet" in capsys.readouterr().out


def test_a_model_beside_candidates(embedded, tmp_path):
    run(*MODEL, "--compare", embedded / "rollouts", "--output_dir", tmp_path / "out")
    found = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert {d["difference"] for d in found["differences"].values()} == {0.0}  # the same seed
    assert "greedy" in found["differences"]


def test_errors_come_first(embedded, tmp_path, monkeypatch):
    monkeypatch.setattr(Sample, "run", None)  # All errors come before a stage runs.
    monkeypatch.setattr(Evaluate, "run", None)
    good, out = write(tmp_path / "good.parquet"), ["--output_dir", tmp_path / "out"]
    assert "does not exist" in fails("--input", tmp_path / "nowhere", *out)
    assert "--compare" in fails("--input", good, "--compare", tmp_path / "nowhere", *out)
    assert "Set --output_dir to the folder to write" in fails("--input", good)
    assert "missing: answer" in fails("--input", write(tmp_path / "a.parquet", answer=None), *out)
    assert "reward or completion." in fails("--input", write(tmp_path / "b.parquet", completion=None), *out)
    assert "missing: problem_id or prompt" in fails("--compare", write(tmp_path / "c.parquet", problem_id=None), *out)
    scored = write(tmp_path / "d.parquet", reward=[1.0] * 8)
    assert "remove reward_funcs" in fails("--input", scored, "--reward_funcs", "think_format_reward", *out)
    assert "compared with itself" in fails("--input", good, "--compare", good, *out)
    assert "topr sample" in fails("--worker", "0/2", *out)
    assert "which topr did not write" in fails(*MODEL, "--output_dir", tmp_path)
    for stage in ("score", "evaluate"):
        manifest.begin(tmp_path / stage, stage, {})
        found = fails(*MODEL, "--output_dir", tmp_path / stage)
        assert f"results of topr {stage} without the rows of this command. Use another output_dir" in found
    assert "is not finished" in fails("--input", _open(tmp_path / "open"), *out)
    assert "a different correct answer" in fails(*MODEL[2:], "--num_test_problems", 2, "--compare", good, *out)
    more = [*MODEL[2:], "--num_test_problems", 5, "--compare", embedded / "rollouts", "--output_dir", tmp_path / "more"]
    assert "2 of 5 in the first are not in the second" in fails(*more)


def _open(folder):
    manifest.begin(folder, "score", {})
    return folder
