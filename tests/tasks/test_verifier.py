import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from scripts.make_careless_model import check, solve_carelessly
from topr_trl import load_rows, score_completions
from topr_trl.tasks.arithmetic import OF, Problem, Step, make_problem, solve
from topr_trl.tasks.verifier import TEMPLATE, extract_verdict, judge, solution_scores, verification_problems


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("3 + 4 = 7, right. Verdict: yes.", "yes"),
        ("Verdict: **No**", "no"),
        ("VERDICT - yes\nmore", "yes"),
        ("Verdict: yes. On second thought, 3 + 4 = 7. Verdict: no", "no"),
        ("**Verdict**: **yes**", "yes"),
        (r"Verdict: $\boxed{\text{No}}$", "no"),
        ("Verdict: no errors were found", None),
        ("Verdict: yesterday", None),
        ("Verdict:", None),
        ("yes", None),
        ("Verdict:" * 100_000, None),
    ],
)
def test_verdicts(text, verdict):
    assert extract_verdict(text) == verdict


@pytest.fixture
def solutions():
    return Dataset.from_dict(
        {
            "question": ["2+2?", "2+2?", "3+3? {solution}", "3+3? {solution}"],
            "completion": [" 4", " 5", r" \frac{6}{1} {question}", " 7"],
            "verdict": ["correct", "incorrect", "correct", "invalid"],
            "problem_id": [7, 7, 9, 9],
        }
    )


def test_a_solution_becomes_a_problem(solutions):
    problems = verification_problems(solutions)
    assert problems["problem_id"][:] == [0, 1, 2, 3]
    assert problems["answer"][:] == ["yes", "no", "yes", "no"]
    assert problems["prompt"][0] == TEMPLATE.replace("{question}", "2+2?").replace("{solution}", " 4")
    # Braces in a question or a solution are plain text.
    assert problems["prompt"][2].startswith("Question: 3+3? {solution}\nAnswer: \\frac{6}{1} {question}\n")


def test_balanced_drops_of_the_larger_kind(solutions):
    more = solutions.select([0, 1, 1, 3, 3, 1])
    problems = verification_problems(more, balanced=True)
    assert sorted(problems["answer"]) == ["no", "yes"]
    assert problems["problem_id"][0] == 0
    assert more[problems["problem_id"][1]]["verdict"] != "correct"
    with pytest.raises(ValueError, match="0 of 1 solutions are correct"):
        verification_problems(solutions.select([1]), balanced=True)


def test_missing_columns_and_places(solutions):
    with pytest.raises(ValueError, match="columns question, completion, verdict"):
        verification_problems(solutions.remove_columns("question"))
    with pytest.raises(ValueError, match="needs the placeholders"):
        verification_problems(solutions, template="Right? {solution}")
    verdicts = solutions["verdict"][:]
    wrong = solutions.remove_columns("verdict").add_column("verdict", ["right", *verdicts[1:]])
    with pytest.raises(ValueError, match="row 0 holds 'right'"):
        verification_problems(wrong)


def test_scores_are_shares_of_yes():
    verifications = Dataset.from_dict(
        {
            "problem_id": [1, 0, 0, 1, 0, 0],
            "completion": ["Verdict: no", "Verdict: yes", "Verdict: yes", "?", "Verdict: no", "?"],
            "answer": ["no", "yes", "yes", "no", "yes", "yes"],
        }
    )
    scored = score_completions(verifications, judge)
    assert scored["reward"][:] == [1.0, 1.0, 1.0, -1.0, -1.0, -1.0]
    assert solution_scores(scored, 2) == [0.5, 0.0]
    with pytest.raises(ValueError, match="1 of 3 solutions have no verification"):
        solution_scores(scored, 3)
    with pytest.raises(ValueError, match="name solutions 0 to 1; num_solutions is 1"):
        solution_scores(scored, 1)
    between = scored.remove_columns("problem_id").add_column("problem_id", [1.5, *[0.0] * 5])
    with pytest.raises(ValueError, match=r"`problem_id`.*row 0 holds 1\.5"):
        solution_scores(between, 2)


def test_the_bundled_author_of_checks():
    rng = random.Random(0)
    for _ in range(200):
        problem = make_problem(rng)
        solution = solve_carelessly(problem, rng, add=0.5, slip=0.3, forget=0.2)
        right = solution == solve(problem)
        assert extract_verdict(check(problem, solution)) == ("yes" if right else "no")


def test_checks_of_an_author():
    problem = Problem("", 1, (Step(OF, 3, 4),), 13)
    assert check(problem, "3 * 4 = 13. 1 + 13 = 14. The answer is 14.") == "3 * 4 = 12, not 13. Verdict: no."
    assert check(problem, "3 + 4 = 7. 1 + 7 = 8. The answer is 8.") == "3 * 4, not 3 + 4. Verdict: no."
    rng, texts = (
        random.Random(0),
        ["3 * 4 = 12. 1 + 12 = 13. The answer is 13.", "3 + 4 = 7. 1 + 7 = 8. The answer is 8."],
    )
    right, wrong = (
        [extract_verdict(check(problem, text, rng, overlook=0.6, slip=0.3, forget=0.2)) for _ in range(2_000)]
        for text in texts
    )
    shares = [np.mean([verdict == kind for verdict in right]) for kind in ("yes", "no", None)]
    # The verdict is yes only if neither of the two results slips. With probability 0.2, it is missing.
    assert shares == pytest.approx([0.7**2 * 0.8, (1 - 0.7**2) * 0.8, 0.2], abs=0.04)
    assert np.mean([verdict == "yes" for verdict in wrong]) == pytest.approx(0.6 * 0.7**2 * 0.8, abs=0.04)


@pytest.mark.weekly
def test_the_example_runs_the_whole_path(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "verifier.py"
    command = [
        sys.executable, str(example), "--output_dir", str(tmp_path), "--num_train_problems", "4",
        "--num_test_problems", "4", "--num_solutions", "2", "--num_generations_eval", "4", "--num_generations", "2",
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    assert "of right" in done.stdout
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results) == ["none", "base verifier", "trained verifier"]
    assert all(0 <= value <= 1 for values in results.values() for value in values.values())
    rows = load_rows(tmp_path / "verifications" / "train")
    assert len(rows) == 4 * 2 * 2
    assert set(rows["answer"]) <= {"yes", "no"}
    assert (tmp_path / "model" / "model.safetensors").is_file()
