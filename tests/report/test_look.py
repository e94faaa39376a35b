import json
import os
import shutil
import sys
import warnings
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer
from topr_trl.cli import main as cli
from topr_trl.data.preparation import ScoredRows
from topr_trl.evaluation.bootstrap import Difference
from topr_trl.pipeline.stages.evaluate import Evaluate, EvaluateArguments
from topr_trl.report import page as page_module
from topr_trl.report.contents import Rows, read_contents
from topr_trl.report.curves import PANELS, draw_panel, has_metric, series, warnings_of
from topr_trl.report.look import LookArguments, look_command
from topr_trl.report.page import write_page
from topr_trl.report.results import (
    _on_certainty,
    bars_of_rows,
    cost_of_rows,
    describe_rows,
    recipes_of_rows,
    results_of,
)
from topr_trl.report.samples import Table, section_of_logged, section_of_rows, sections_of_tests, tables_of, whole_turns
from topr_trl.tasks.arithmetic import CARELESS_MODEL

HOSTILE = "</script><img src=x onerror=document.title='hacked'><b>bold</b>"
TOKENS = {
    "tokens": [[HOSTILE, "context"]] * 4, "token_log_ratio": [[-1.0, None]] * 4, "token_weight": [[0.3679, None]] * 4
}  # fmt: skip
LOSS = next(panel for panel in PANELS if panel.title == "Loss")


@pytest.fixture
def run(model, tokenizer, rows, tmp_path):
    """Return the folder of a training run of four steps, with checkpoints after steps 2 and 4."""
    args = OfflineTOPRConfig(
        str(tmp_path / "run"), per_device_train_batch_size=4, num_train_epochs=2, learning_rate=1e-3, bf16=False,
        use_cpu=True, gradient_checkpointing=False, save_steps=2, logging_steps=1, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    OfflineTOPRTrainer(model, args, rows, processing_class=tokenizer).train()
    return tmp_path / "run"


def log_rows(folder, step, **columns):
    (folder / "completions").mkdir(parents=True, exist_ok=True)
    table = {"step": [step] * 4, "prompt": ["1 + 1 ="] * 4, "completion": ["2", "3", "4", "5"],
             "reward": [1.0, 0, 0, 0],
             "advantage": [1.0, -1.0, -1.0, -1.0],
             "weight": [1.0, 0.9, 0.5, 0.001],
             "log_ratio": [None, -0.1, -0.7, -6.9], **columns}  # fmt: skip
    pq.write_table(pa.table(table), folder / f"completions/completions_{step:05d}.parquet")


def logged(folder):
    """Return the rows that a run logged."""
    return read_contents(folder).logged[0].read()


def page_of(folder):
    """Write the page of a folder, and return its data."""
    write_page(folder, folder / "report.html")
    return data_in(folder / "report.html")


def data_in(page):
    return json.loads(page.read_text().partition('id="data">')[2].partition("</script>")[0])


def table(name="rows", **columns):
    return Table.of(Rows(name, lambda: pa.table(columns)))


def save(folder, **columns):
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), folder / "rows-00000-of-00001.parquet")


def save_test(folder, right, completion="7"):
    """Save a greedy answer and two samples for each of three problems. `right` has the verdicts of each problem."""
    verdicts = [verdict for problem in right for verdict in problem]
    save(
        folder, prompt=[f"{n} + 1 =" for n in (0, 0, 0, 1, 1, 1, 2, 2, 2)], problem_id=[0, 0, 0, 1, 1, 1, 2, 2, 2],
        completion=[completion] * 9, answer=["7"] * 9, temperature=[0.0, 1.0, 1.0] * 3,
        extracted=["7" if good else "8" for good in verdicts],
        verdict=["correct" if good else "incorrect" for good in verdicts], reward=[float(good) for good in verdicts],
    )  # fmt: skip


@pytest.fixture
def loop(tmp_path):
    """Return the folder of a loop in which one problem got better, one got worse, and one stayed wrong."""
    save_test(tmp_path / "loop" / "base" / "test" / "rollouts", [[0, 0, 1], [1, 1, 1], [0, 0, 0]])
    save_test(tmp_path / "loop" / "iteration-1" / "test" / "rollouts", [[1, 1, 1], [0, 1, 0], [0, 0, 0]], HOSTILE)
    save(
        tmp_path / "loop" / "iteration-1" / "rollouts", prompt=["a ="] * 4 + ["b ="] * 4, completion=["1", "2"] * 4,
        reward=[1.0, 0, 1, 0, 0, 0, 0, 0],
    )  # fmt: skip
    return tmp_path / "loop"


def test_a_loop_shows_what_changed(loop):
    page = page_of(loop)
    tests, rows = page["sections"]
    assert page["kind"] == "Loop of 1 iteration"
    assert page["sentences"][0].startswith("Greedy answers: 33.3% → 33.3%, not distinguishable (+0.0 points")
    assert tests["counts"] == {"worse": 1, "better": 1, "still wrong": 1}
    assert [card["tags"] for card in tests["cards"]] == [["worse"], ["better"], ["still wrong"]]
    better = next(card for card in tests["cards"] if card["tags"] == ["better"])
    assert [(column["name"], [one["right"] for one in column["answers"]]) for column in better["columns"]] == [
        ("before training", [False, True, False]),
        ("iteration-1", [True, True, True]),
    ]
    assert rows["counts"] == {"some right answers": 1, "no right answer": 1}
    assert any("some right answers" in advice for advice in page["advice"])
    entry = {"inputs": {"curation": "repeated_positives"}, "sources": {}, "finished": "now", "rows": 4}
    (loop / "_manifest.json").write_text(json.dumps({"files": {}, "stages": {"train": entry}}))
    assert not any("some right answers" in advice for advice in page_of(loop)["advice"])


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_the_page_in_a_browser(loop, browser, width, scheme):
    """Texts of the model stay texts, tags and search filter, and nothing is wider than the window."""
    log_rows(loop / "iteration-1" / "model", 1, **TOKENS)
    write_page(loop, loop / "report.html")
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    requests, errors = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(error))
    page.goto((loop / "report.html").as_uri())
    assert page.title() == "loop"
    assert page.locator(".card").count() == 3
    assert HOSTILE in page.locator(".card").first.inner_text()
    assert page.locator(".card img, .card b:has-text('bold')").count() == 0
    page.get_by_role("button", name="better (1)").click()
    assert page.locator(".card").count() == 1
    page.get_by_role("button", name="all").click()
    page.get_by_label("Search").fill("columns")  # the name of a field, and no text
    assert page.locator(".card").count() == 0
    page.get_by_label("Search").fill("2 + 1 =")
    assert page.locator(".card").count() == 1
    page.get_by_role("button", name="Rows of iteration-1", exact=True).click()
    assert "a =" in page.locator(".card").first.inner_text() + page.locator(".card").last.inner_text()
    page.get_by_role("button", name="Logged rows of iteration-1").click()
    answer = page.locator(".answer").first
    answer.get_by_text("tokens", exact=True).click()
    first, second = answer.locator(".token").nth(0), answer.locator(".token").nth(1)
    assert first.inner_text() == HOSTILE
    assert (first.get_attribute("title"), second.get_attribute("title")) == ("log π/μ -1, w 0.37", None)
    colors = [first.evaluate("node => getComputedStyle(node).backgroundColor")]
    answer.get_by_role("button", name="show w").click()
    colors.append(answer.locator(".token").first.evaluate("node => getComputedStyle(node).backgroundColor"))
    assert colors == ["rgba(220, 60, 50, 0.3)", "rgba(128, 128, 128, 0.38)"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == errors == []
    page.close()


def test_look_needs_no_torch(loop, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "trl", None)
    look_command(LookArguments(str(loop)))
    said = capsys.readouterr().out.splitlines()
    assert said[-3:] == [
        "Test problems, by greedy answers: 3 problems, 18 completions.",
        "Rows of iteration-1: 2 problems, 8 completions.",
        f"The page is {loop}/report.html.",
    ]  # fmt: skip


def test_rows_to_train_on(tmp_path):
    rows = [{"prompt": f"{n // 2} =", "completion": "x" * n, "reward": n / 10} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    cli.main(["look", "--input", str(tmp_path / "rows.jsonl")])
    page = data_in(tmp_path / "rows.report.html")
    assert page["rows"][0]["facts"][:3] == [["completions", "20"], ["problems", "10"], ["without a reward", "0"]]
    assert page["sections"][0]["counts"] == {"highest rewards": 1, "lowest rewards": 1}
    assert page["rows"][0]["bars"][0][0] == "completions by reward"


def test_disagreeing_reward_functions_and_missing_rewards():
    found = section_of_rows(
        table(**{"prompt": list("aabb"), "completion": list("wxyz"), "reward": [1.0, 0.0, None, None],
                 "rewards/length": [0.0, 1.0, 1.0, 1.0], "rewards/judge": [1.0, 0.0, 1.0, 0.0]}),
    )  # fmt: skip
    assert found.counts == {"some right answers": 1, "reward functions disagree": 1, "without a reward": 1}


def test_reward_functions_named_like_columns():
    columns = {"reward": [0.5], "rewards/reward": [0.25], "weight": [1.0], "rewards/weight": [1.0], "rewards/a": [0.0]}
    (card,) = section_of_rows(table(prompt=["a"], completion=["b"], **columns)).cards
    assert card["columns"][0]["answers"][0]["numbers"] == {
        "reward": 0.5, "weight": 1.0, "rewards/reward": 0.25, "rewards/weight": 1.0, "a": 0.0
    }  # fmt: skip


@pytest.mark.parametrize(("recommended", "shown"), [("second", "second"), (None, "first")])
def test_a_trial_shows_the_recommended_setting(tmp_path, recommended, shown):
    arms = [{"folder": name, "recommended": name == recommended} for name in ("base", "first", "second")]
    (tmp_path / "trial.json").write_text(json.dumps({"arms": arms, "by_answers": True}))
    for arm in arms:
        save_test(tmp_path / arm["folder"] / "rollouts", [[0, 0, 1]] * 3)
    assert [test.name for test in read_contents(tmp_path).tests] == ["before training", shown]


def test_logged_rows_by_weight(tmp_path):
    log_rows(tmp_path, 3)
    (tmp_path / "_manifest.json").write_text(json.dumps({"files": {}, "stages": {
        "train": {"inputs": {}, "sources": {"input": "../rows.jsonl"}, "finished": "now", "rows": 4},
    }}))  # fmt: skip
    assert "rows.jsonl holds no rows any more" in read_contents(tmp_path).notes[0]
    found = section_of_logged(Table.of(read_contents(tmp_path).logged[0]))
    assert found.counts == {"dead negative (w < 0.01)": 1, "positive": 1, "tapered negative (w < 1)": 1}
    assert found.cards[0]["columns"][0]["answers"][0]["numbers"] == {"advantage": 1.0, "weight": 1.0}


def test_logged_tokens_have_their_values(tmp_path):
    log_rows(tmp_path, 3, **TOKENS)
    page = page_of(tmp_path)
    assert page["sections"][-1]["cards"][0]["columns"][0]["answers"][0]["tokens"] == [
        [HOSTILE, -1.0, 0.37],
        ["context", None, None],
    ]


def test_the_rows_of_a_rollout_count_once():
    """As in `ScoredRows.diagnose`, a rollout has the answer of its last row."""
    columns = {
        "prompt": ["a"] * 6, "problem_id": [1] * 6, "completion": list("xyzxyq"), "reward": [1.0, 1.0, 0, 0, 0, 0],
        "rollout_id": ["r", "r", "s", "s", "t", "u"], "extracted": ["7", "7", "8", "9", "8", "9"]
    }  # fmt: skip
    rows = table(**columns)
    found = ScoredRows.read("train", Dataset.from_dict(columns)).diagnose().counts
    assert section_of_rows(rows).counts == {kind: n for kind, n in found.items() if n}
    assert section_of_rows(rows).counts == {"some right answers": 1}
    assert dict(bars_of_rows(rows))["completions by reward"] == [("0", 3), ("1", 1)]
    assert recipes_of_rows(rows)[1][:3] == ["none", "4", "1"]


def test_what_training_would_read():
    rows = table(prompt=["a", "b"] * 4, completion=["x" * 40] * 8, reward=[1.0, None, 0, 0, 0, 1, 0, 0])
    with warnings.catch_warnings(action="error"):
        _, none, balanced, repeated = recipes_of_rows(rows)
    assert none == ["none", "7", "2", "50%", "1"]
    assert balanced[0] == "balanced"
    assert (repeated[0], repeated[2], repeated[3]) == ("repeated_positives", repeated[1], "100%")
    assert "topr plan --model 8b --num_train_problems 2 --num_generations 4 --prompt_tokens 1" in cost_of_rows(rows)
    assert "--max_new_tokens 10" in cost_of_rows(rows)
    (_, refused) = recipes_of_rows(table(prompt=["a"], completion=["x"], reward=[float("inf")]))
    assert "inf" in refused[1]


def test_conversations_have_turns_and_long_texts_are_cut():
    asked = [{"role": "user", "content": "Hi"}]
    said = [{"role": "assistant", "content": "y" * 5_000, "tool_calls": [{"function": {"name": "look"}}]}]
    (card,) = sections_of_tests([table(prompt=[asked], completion=[said], reward=[1.0])])[0].cards
    (turn,) = card["columns"][0]["answers"][0]["turns"]
    assert card["prompt"] == [{"role": "user", "text": "Hi"}]
    assert turn["role"] == "assistant"
    assert "more characters" in turn["text"]
    assert len(turn["text"]) < 4_100
    facts = dict(describe_rows(table(prompt=[asked], completion=[said[:1]], reward=[1.0])))
    assert "5,0" in facts["characters (median, 95%, longest)"]  # of the whole text


def test_rewards_without_answers(tmp_path):
    for name, rewards in (("before", [0.1, 0.3]), ("after", [0.6, 0.7])):
        save(tmp_path / name / "test", prompt=["a", "b"], completion=["x", "y"], reward=rewards)
    assert results_of(read_contents(tmp_path).tests).sentences == [
        "Reward: 0.200 → 0.650, better (+0.450, 95% interval [+0.400, +0.500])."
    ]


def test_a_test_that_is_not_finished(loop):
    shard = loop / "iteration-1" / "test" / "rollouts" / "rows-00000-of-00001.parquet"
    shard.rename(shard.with_name("rows-00000-of-00002.parquet"))
    page = page_of(loop)
    assert page["notes"] == ["iteration-1 is still being tested, so its test is left out."]
    assert page["sections"][0]["counts"] == {"right": 1, "wrong": 2}


def test_a_problem_without_an_answer_of_a_model_is_neither_better_nor_worse():
    tests = tables_of(
        Rows(
            "rows", partial(pa.table, {"prompt": list(prompts), "completion": ["x"] * len(prompts), "reward": rewards})
        )
        for prompts, rewards in (("abc", [0.0, 1.0, 0.0]), ("ab", [1.0, 1.0]))
    )
    assert sections_of_tests(tests)[0].counts == {
        "better": 1, "still right": 1, "not answered by all models": 1
    }  # fmt: skip


def test_a_comparison(tmp_path):
    for name, right in (("a", [[0, 0, 0]] * 3), ("b", [[1, 1, 1]] * 3)):
        save_test(tmp_path / name / "scored", right)
    folders = [str(tmp_path / name / "scored") for name in "ab"]
    stage = Evaluate(EvaluateArguments(input=folders[0], compare=folders[1], output_dir=str(tmp_path / "out")))
    stage.run()
    page = page_of(tmp_path / "out")
    assert page["sentences"][0].startswith("Greedy answers: 0.0% → 100.0%, better")
    assert page["sections"][0]["counts"] == {"better": 3}
    shutil.rmtree(folders[0])
    page = page_of(tmp_path / "out")
    assert [section["counts"] for section in page["sections"]] == [{"right": 3}]
    assert "scored holds no rows any more" in page["notes"][0]


def test_results_use_the_threshold_of_the_evaluation(loop):
    for name in ("base", "iteration-1"):
        test = loop / name / "test"
        settings = {"input": str(test / "rollouts"), "output_dir": str(test / "results"), "pass_threshold": 0.0}
        Evaluate(EvaluateArguments(**settings)).run()
    for folder in (loop, loop / "base" / "test" / "results"):
        page = page_of(folder)
        assert "with a reward of at least 0)" in page["table"]
        assert "Sampled answers: 100.0%" in page["sentences"][1]


def test_a_model_that_is_always_wrong_is_compared_by_the_rewards_of_the_other(tmp_path):
    for name, rewards in (("before", [-1.0, 1.0]), ("after", [-1.0, -1.0])):
        save(tmp_path / name / "test", prompt=["a", "b"], completion=["x", "y"], reward=rewards)
    assert page_of(tmp_path)["sections"][0]["counts"] == {"worse": 1, "still wrong": 1}


def test_texts_that_only_look_like_messages_are_shown():
    for text in ('[{"name": "a"}]', '[{"role": "x"}, 3]', "[{" + '"a":[' * 100_000):
        assert whole_turns(text) == [("", text)]
    (card,) = section_of_rows(table(prompt=["a"], completion=["x"], reward=[1.0], answer=[0])).cards
    assert card["truth"] == "0"
    assert card["tags"] == []  # neither the highest nor the lowest rewards


def test_a_large_page_keeps_cards_with_each_tag(tmp_path, monkeypatch):
    monkeypatch.setattr(page_module, "_MOST_BYTES", 3_000)
    save(tmp_path, prompt=[f"{n}" for n in range(90)], completion=["x"] * 90, reward=[0.0, 0.5, 1.0] * 30)
    (section,) = page_of(tmp_path)["sections"]
    tags = [tag for card in section["cards"] for tag in card["tags"]]
    assert sorted(tags) == sorted(2 * list(section["counts"]))
    assert section["problems"] == 90


def test_answers_that_no_judge_found_do_not_agree():
    rows = table(prompt=["a"] * 3, completion=list("xyz"), reward=[0.0] * 3, extracted=["", "", ""])
    rows.levels = np.array([0.0, 1.0])  # as in another iteration
    assert section_of_rows(rows).counts == {"no right answer": 1}


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": ["a", "b"], "completion": ["x", "y"], "reward": [float("inf"), 0.0]},
        {"prompt_ids": [[1], [1]], "completion_ids": [[2], [3]], "reward": [1.0, 0.0]},
        {"prompt": ["", "[]"], "completion": ["x", "y"], "reward": [1.0, None]},
        {"prompt": ["a"] * 3_000, "completion": ["x"] * 3_000, "rewards/f": [1.0] * 3_000, "rewards/g": [0.0] * 3_000},
    ],
)  # fmt: skip
def test_unusual_rows_have_a_page(tmp_path, columns):
    save(tmp_path / "MY_DATA", **columns)
    assert page_of(tmp_path / "MY_DATA")["sections"]


def test_wrong_columns_are_named(tmp_path):
    save(tmp_path / "words", prompt=["a"], completion=["x"], reward=["bad"])
    with pytest.raises(ValueError, match=r"`reward` .*topr import"):
        page_of(tmp_path / "words")
    save(tmp_path / "turns", prompt=["a"], completion=["x"], turn_rewards=[["good"]])
    with pytest.raises(ValueError, match=r"`turn_rewards` .*lists of numbers"):
        page_of(tmp_path / "turns")
    save(tmp_path / "none", completion=["x"], reward=[1.0])
    with pytest.raises(ValueError, match=r"none .* without a column prompt"):
        page_of(tmp_path / "none")


@pytest.mark.parametrize("given", [[], ["a", "b"]])
def test_one_folder_is_needed(given):
    with pytest.raises(ValueError, match=r"--input"):
        cli.main(["look", *given])


def test_a_yaml_file_names_the_folder(loop, tmp_path, capsys):
    (tmp_path / "look.yaml").write_text(f"input: {loop}\nenv: {{A: b}}\n")
    cli.main(["look", "--config", str(tmp_path / "look.yaml")])
    assert "problems, 8 completions" in capsys.readouterr().out


def test_advice_on_certainty():
    said = [_on_certainty(Difference(gap, low, high, 0.9), 100) for gap, low, high in
            ((0.1, 0.05, 0.15), (0.1, -0.1, 0.3), (-0.1, -0.25, 0.0), (0.001, -0.1, 0.1))]  # fmt: skip
    assert said[0] == []
    assert "about 400 test problems" in said[1][0]
    assert "about 200 test problems" in said[2][0]
    assert "equal" in said[3][0]


def test_nothing_to_show(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--input"):
        cli.main(["look", str(tmp_path / "nowhere")])
    with pytest.raises(FileNotFoundError, match=r"has nothing to show.* topr import"):
        cli.main(["look", "--input", str(tmp_path)])


def test_the_rules_of_the_page_metrics():
    healthy = [{"step": step, "topr/negatives_dead": 0.1, "topr/log_ratio/negatives/q50": 0.0,
                "topr/logps/positives/token": -1.0} for step in range(1, 31)]  # fmt: skip
    assert warnings_of(healthy) == []
    dead, far, lost = (
        warnings_of([{**healthy[0], **first}, *healthy[1:20], *[{**one, **last} for one in healthy[20:]]])
        for first, last in (({"topr/negatives_dead": 0.5}, {}), ({"topr/log_ratio/negatives/q50": -9.0}, {}),
                            ({}, {"topr/logps/positives/token": -2.0}))
    )  # fmt: skip
    assert [len(dead), len(far), len(lost)] == [1, 1, 1]
    assert "ratio_level" in dead[0]
    assert "log μ" in far[0]
    assert "collapse" in lost[0]


@pytest.mark.slow
def test_a_run_that_is_not_finished(run):
    (run / "trainer_state.json").unlink()
    assert [entry["step"] for entry in read_contents(run).histories["run"] if "loss" in entry] == [1, 2, 3, 4]
    (run / "checkpoint-4" / "trainer_state.json").write_text('{"log_hist')  # as if a trainer were writing it
    log_rows(run, 1)
    (run / "completions" / "completions_00002.parquet").write_bytes(b"PAR1")
    found = read_contents(run)
    assert [entry["step"] for entry in found.histories["run"] if "loss" in entry] == [1, 2]
    (run / "completions" / "completions_00003.parquet").symlink_to("removed")
    assert logged(run).num_rows == 4
    assert page_of(run)["kind"] == "Training run, 2 optimizer steps"
    (run / "completions" / "completions_00001.parquet").unlink()
    assert logged(run).num_rows == 0
    assert page_of(run)["kind"] == "Training run, 2 optimizer steps"


def test_entries_of_a_log_that_are_no_entries_are_left_out(tmp_path):
    state = {"log_history": [{"step": 3, "loss": 1.0}, None, {"loss": 2.0}, {"step": "4", "loss": 3.0}, {"step": True}]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    assert read_contents(tmp_path).histories == {tmp_path.name: [{"step": 3, "loss": 1.0}]}


def test_a_training_that_fails_leaves_its_log(model, tokenizer, rows, tmp_path, monkeypatch):
    args = OfflineTOPRConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", save_strategy="no",
                             logging_steps=1,
                             gradient_checkpointing=False, per_device_train_batch_size=2)  # fmt: skip
    trainer = OfflineTOPRTrainer(model, args, rows, processing_class=tokenizer)
    step, taken = trainer.training_step, []

    def fail_at_the_third(*args, **kwargs):
        taken.append(None)
        if len(taken) == 3:
            raise RuntimeError("out of memory")
        return step(*args, **kwargs)

    monkeypatch.setattr(trainer, "training_step", fail_at_the_third)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    assert [entry["step"] for entry in read_contents(tmp_path).histories[tmp_path.name]] == [1, 2]


@pytest.mark.slow
def test_the_newest_log_is_shown(model, tokenizer, rows, run):
    """The page shows the newest log, even that of a shorter second training in the same folder."""
    args = OfflineTOPRConfig(
        str(run), per_device_train_batch_size=4, max_steps=3, learning_rate=1e-4, bf16=False, use_cpu=True,
        gradient_checkpointing=False, logging_steps=1, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    OfflineTOPRTrainer(model, args, rows, processing_class=tokenizer).train()
    assert read_contents(run).histories["run"][-1]["step"] == 3
    log_rows(run, 4, completion=["old"] * 4)
    log_rows(run, 2)
    assert logged(run)["completion"].to_pylist() == ["2", "3", "4", "5", "old"]


@pytest.mark.slow
def test_an_earlier_log_outlives_a_training_that_does_not_begin(run, rows):
    before = (run / "trainer_state.json").read_text()
    shutil.rmtree(run / "checkpoint-2")
    shutil.rmtree(run / "checkpoint-4")
    args = OfflineTOPRConfig(str(run), use_cpu=True, bf16=False, report_to="none")
    with pytest.raises(ValueError, match="checkpoint"):
        OfflineTOPRTrainer(str(CARELESS_MODEL), args, rows).train(resume_from_checkpoint=True)
    assert (run / "trainer_state.json").read_text() == before


def test_logs_that_were_copied_at_once_are_ordered_by_their_step(tmp_path):
    names = {f"checkpoint-{step}": step for step in (*range(1, 10), 20, *range(10, 20))}
    for name, step in {**names, "": 21}.items():
        (tmp_path / name).mkdir(exist_ok=True)
        path = tmp_path / name / "trainer_state.json"
        path.write_text(json.dumps({"log_history": [{"step": step, "loss": 1.0}]}))
        os.utime(path, (1, 1))
    assert read_contents(tmp_path).histories[tmp_path.name][-1]["step"] == 21
    path.unlink()
    assert read_contents(tmp_path).histories[tmp_path.name][-1]["step"] == 20


def test_series():
    history = [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": float("nan")},
        {"step": 3, "eval_loss": 2},
        {"step": 4, "loss": 3},
    ]
    steps, values = series(history, "loss")
    assert steps.tolist() == [1, 4]
    assert values.tolist() == [1.0, 3.0]
    assert len(series(history, "nothing")[0]) == 0
    assert not has_metric(PANELS[0], history)


def test_long_runs_are_smoothed_at_the_right_height():
    history = [{"step": step, "loss": 5 + (-1.0) ** step} for step in range(1, 1001)]
    pale, bold = draw_panel(LOSS, {"run": history}).axes[0].lines
    assert np.ptp(pale.get_ydata()) == 2
    assert np.abs(bold.get_ydata() - 5).max() < 0.1


@pytest.mark.parametrize(("zero", "steps", "scale"), [(1.0, 3, "log"), (0.0, 3, "linear"), (0.0, 300, "linear")])
def test_a_value_of_zero_makes_the_scale_linear(zero, steps, scale):
    """A value of 0 makes the scale linear, also in a later training run and in a smoothed curve."""
    first = [{"step": step, "grad_norm": 1.0} for step in range(steps)]
    second = [*first, {"step": steps, "grad_norm": zero}]
    panel = next(p for p in PANELS if p.scale == "log")
    assert draw_panel(panel, {"one": first, "two": second}).axes[0].get_yscale() == scale


def test_a_turn_with_a_reward_of_its_own_is_a_completion(tmp_path):
    talk = [
        {"role": "assistant", "content": "Lyon"}, {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Paris"}, {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "Bye"},
    ]  # fmt: skip
    prompt = [{"role": "user", "content": "Capital of France?"}]
    rows = [
        {"prompt": prompt, "completion": talk, "turn_rewards": [-1.0, 1.0, None], "reward": None, "rollout_id": "a"},
        {"prompt": prompt, "completion": talk[:1], "turn_rewards": None, "reward": -1.0, "rollout_id": None},
        {"prompt": prompt, "completion": talk[:1], "turn_rewards": [None], "reward": None, "rollout_id": None},
    ]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    (found,) = read_contents(tmp_path / "rows.parquet").read_rows
    table = found.read().to_pylist()
    section = section_of_rows(Table.of(found))
    assert str(section) == "rows.parquet: 1 problem, 4 completions."
    assert section.counts == {"right and wrong answers": 1}
    assert [one["labels"] for one in section.cards[0]["columns"][0]["answers"]] == [["turn 2"], [], []]
    assert cost_of_rows(Table.of(found)) == ""
    assert [(json.loads(row["completion"])[-1]["content"], row["reward"]) for row in table] == [
        ("Lyon", -1.0), ("Paris", 1.0), ("Lyon", -1.0), ("Lyon", None)
    ]  # fmt: skip
    assert [len(json.loads(row["prompt"])) for row in table] == [1, 1, 1, 1]
