import json

import pytest

from topr_trl.pipeline.problems import load_problems
from topr_trl.pipeline.settings import ProblemArguments
from topr_trl.tasks import TASKS, Task, gsm8k


def prepare(rows, num_shots):
    shouted = rows.map(lambda row, i: {"prompt": row["prompt"].upper(), "problem_id": i}, with_indices=True)
    return shouted.select_columns(["problem_id", "prompt", "answer"])


@pytest.mark.parametrize(
    ("columns", "row", "prompt"),
    [
        ((), {"prompt": "say 7", "answer": "7"}, "SAY 7"),
        ((), {"prompt": "say 7", "answer": "7", "question": "?", "problem": "?"}, "SAY 7"),
        (("prompt",), {"prompt": "say 7", "answer": "7"}, "SAY 7"),
        (("tests",), {"prompt": "say 7", "answer": "7", "tests": "t"}, "SAY 7"),
        (("tests",), {"prompt": "say 7", "answer": "7"}, "say 7"),  # These rows have their prompts already.
        ((), {"problem_id": 3, "prompt": "say 7", "answer": "7"}, "say 7"),  # problems that `topr trial` wrote
    ],
)
def test_a_new_task_prepares_its_rows(monkeypatch, tmp_path, columns, row, prompt):
    task = Task("shout", gsm8k.load, prepare, 0, (), gsm8k.judge, columns)
    monkeypatch.setitem(TASKS, "shout", task)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    problems = load_problems(ProblemArguments(task="shout", dataset_name=str(tmp_path / "rows.jsonl")), "train")
    assert problems["prompt"][:] == [prompt]


@pytest.mark.parametrize("task", ["math", "prompts"])
def test_only_the_default_task_has_built_in_problems(task):
    for split in ("train", "test"):
        with pytest.raises(ValueError, match=rf"(?s){task}.*--dataset_name.*--task gsm8k"):
            load_problems(ProblemArguments(task=task), split)


def test_answers_that_the_judge_cannot_read_are_refused_before_sampling(tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "Say 7.", "answer": "7"}\n{"prompt": "Say hello.", "answer": "hello"}'
    )
    for task in (None, "gsm8k"):
        with pytest.raises(ValueError, match=r"`answer` holds 'hello'.*--task prompts"):
            load_problems(ProblemArguments(task=task, dataset_name=str(tmp_path / "rows.jsonl")), "train")
    args = ProblemArguments(task="prompts", dataset_name=str(tmp_path / "rows.jsonl"))
    assert load_problems(args, "train")["answer"][:] == ["7", "hello"]
