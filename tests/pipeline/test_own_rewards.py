"""Test the user's own prompts, messages and reward functions, in the stages and in the loop."""

import json
import shutil
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.loops import stage_of, steps_of
from topr_trl import load_rows, save_rows
from topr_trl.cli.evaluate import evaluate_command
from topr_trl.cli.parsing import parse
from topr_trl.data.tables import shards_of
from topr_trl.evaluation.report import EVALUATION, read_evaluation
from topr_trl.pipeline.launch import write_settings
from topr_trl.pipeline.loop import check, check_trainable
from topr_trl.pipeline.problems import load_problems, stop_strings_of
from topr_trl.pipeline.settings import IterateArguments
from topr_trl.pipeline.shards import stages_of
from topr_trl.pipeline.stages.curate import CurateArguments
from topr_trl.pipeline.stages.evaluate import Evaluate, EvaluateArguments
from topr_trl.pipeline.stages.sample import SampleArguments
from topr_trl.pipeline.stages.score import Score, ScoreArguments
from topr_trl.pipeline.steps import Step, run_steps
from topr_trl.tasks import arithmetic

CODE = """
def vowels(completions, **kwargs):
    return [None if "7" in text else sum(letter in "aeiou" for letter in text) / 10 for text in completions]

async def target_in(completions, target, **kwargs):
    return [float(right in text) for text, right in zip(completions, target)]
"""
SAMPLING = {"num_generations": 4, "max_new_tokens": 12, "problems_per_shard": 2, "use_cpu": True}
FUNCTIONS = ["rewards.py:vowels", "rewards.py:target_in"]


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(CODE)
    prompts = [
        {"prompt": f"Ana has {n} pens. Ana finds 3 more.", "target": str(n + 3), "note": {"n": n}} for n in range(1, 7)
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))


def sampled(out="rows", **more):
    args = SampleArguments(output_dir=out, **{"dataset_name": "prompts.jsonl", "task": "prompts", **SAMPLING, **more})
    stage_of("sample", args).run()
    return out


def scoring(rows="rows", **more):
    return Score(ScoreArguments(input=rows, output_dir=rows, reward_funcs=FUNCTIONS, **more))


def test_prompts_keep_their_columns_and_need_no_task_and_no_test_prompts():
    args = SampleArguments(output_dir="rows", dataset_name="prompts.jsonl", **SAMPLING)
    stage_of("sample", args).run()
    rows = load_rows("rows")
    assert len(rows) == 24
    assert rows[0]["target"] == "4"
    assert rows[0]["note"] == {"n": 1}
    assert stop_strings_of(args, load_problems(args, "train")) == ()
    with pytest.raises(ValueError, match="--test_dataset_name"):
        SampleArguments(output_dir="rows", dataset_name="prompts.jsonl", split="test")


def test_columns_with_gaps_have_the_same_type_in_all_shards(tmp_path):
    prompts = [
        {"prompt": "1 + 2 =", "hint": None, "wrong": [], "tests": [1, "a"], "note": {"by": None}},
        {"prompt": "3 + 4 =", "hint": "add", "wrong": ["8"], "tests": [{"b": 1}], "note": {"by": "Ana"}},
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    sampled(num_generations=1, problems_per_shard=1)
    Score(ScoreArguments(input="rows", output_dir="rows", reward_funcs=FUNCTIONS[:1])).run()
    assert len(shards_of("rows")) == 2
    assert [{name: row[name] for name in prompts[0]} for row in load_rows("rows")] == prompts


def test_a_prompt_that_is_too_long_is_found_before_the_first_shard(tmp_path):
    """Remedies such as a lower `max_new_tokens` change the inputs of the stage, so it would refuse its own shards."""
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"prompt": "pens " * 3_000, "target": "1"}))
    with pytest.raises(ValueError, match="do not fit in the model's context"):
        sampled()
    assert not list((tmp_path / "rows").glob("*.parquet"))


def test_rewards_are_written_and_rows_without_one_are_not_chosen():
    done = scoring(sampled(), reward_weights=[1.0, 2.0]).run()
    rows = load_rows("rows")
    missing = [row["rewards/vowels"] is None for row in rows]
    assert any(missing)
    assert not all(missing)
    for row in rows:
        assert row["reward"] == pytest.approx((row["rewards/vowels"] or 0.0) + 2 * row["rewards/target_in"])
    assert "mean reward" in Score.summary(done)
    only_vowels = Score(ScoreArguments(input="rows", output_dir="vowels", reward_funcs=FUNCTIONS[:1]))
    assert f"{sum(missing)} without a reward" in Score.summary(only_vowels.run())
    curate = stage_of("curate", CurateArguments(input="vowels", output_dir="vowels"))
    curate.run()
    found = load_rows("vowels")
    assert [row["reward_after_baseline"] is None for row in found] == missing
    chosen = [row["reward_after_baseline"] for row in found if row["reward_after_baseline"] is not None]
    assert sum(chosen) == pytest.approx(0, abs=1e-6)


def test_messages_are_written_with_the_template_and_its_arguments(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(arithmetic.CARELESS_MODEL)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if think is false %}no thinking\n{% endif %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer.save_pretrained("model")
    AutoModelForCausalLM.from_pretrained(arithmetic.CARELESS_MODEL).save_pretrained("model")
    prompts = [
        {"prompt": [{"role": "user", "content": "Say hi."}], "target": "hi", "chat_template_kwargs": {"think": False}},
        {"prompt": [{"role": "user", "content": "Say hi."}], "target": "hi", "chat_template_kwargs": {"think": None}},
    ]
    (tmp_path / "messages.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (tmp_path / "rewards.py").write_text(
        "def length(completions, **_):\n    return [len(m[-1]['content']) for m in completions]"
    )
    sampled(dataset_name="messages.jsonl", model_name_or_path="model")
    Score(ScoreArguments(input="rows", output_dir="rows", reward_funcs=["rewards.py:length"])).run()
    rows = load_rows("rows")
    texts = [tokenizer.decode(row["prompt_ids"]) for row in rows]
    assert texts == ["user: Say hi.\nno thinking\nassistant:"] * 4 + ["user: Say hi.\nassistant:"] * 4
    assert [turn["role"] for turn in rows[0]["completion"]] == ["assistant"]
    assert rows[0]["reward"] == len(rows[0]["completion"][0]["content"])


def test_another_function_is_noticed(tmp_path):
    sampled()
    scoring().run()
    assert scoring().is_finished()
    unchanged, later = scoring(), scoring(sampled("more"))
    (tmp_path / "rewards.py").write_text(CODE + "\n# another")
    with pytest.raises(ValueError, match="reward_funcs: the file of a reward function has changed"):
        scoring().is_finished()
    with pytest.raises(ValueError, match="changed since this run started"):  # as in a running loop
        unchanged.is_finished()
    with pytest.raises(ValueError, match="changed since this run started"):  # before the stage gets a new process
        run_steps([Step(later)], loop(), tmp_path, side="sampling")
    (tmp_path / "rewards.py").write_text(CODE)
    with pytest.raises(ValueError, match="reward_weights"):
        scoring(reward_weights=[1.0, 3.0]).run()
    assert scoring(reward_weights=[1.0, 1.0]).is_finished()


def test_the_same_completions_can_be_scored_again_in_another_folder(tmp_path):
    sampled()
    scoring().run()
    (tmp_path / "rewards.py").write_text(CODE.replace("/ 10", "/ 100"))
    Score(ScoreArguments(input="rows", output_dir="again", reward_funcs=FUNCTIONS[:1])).run()
    first, second = load_rows("rows"), load_rows("again")
    assert first["completion"][:] == second["completion"][:]
    assert "rewards/vowels" not in second.column_names
    for before, now in zip(first["rewards/vowels"], second["reward"], strict=True):
        assert (before is None) == (now is None)
        assert before is None or now == pytest.approx(before / 10)


def test_a_function_that_fails_loses_no_completion_and_mixes_no_rewards(tmp_path):
    sampled()
    completions = load_rows("rows")["completion"][:]
    fails = CODE.replace("return [float", "if target[0] == '8':\n        return []\n    return [float")
    (tmp_path / "rewards.py").write_text(fails)
    with pytest.raises(ValueError, match=r"rows-00002-of-00003.*'target_in' returned 0 rewards for 8"):
        scoring().run()
    assert [("score" in stages_of(shard)) for shard in shards_of("rows")] == [True, True, False]
    (tmp_path / "rewards.py").write_text(CODE.replace("/ 10", "/ 100"))
    assert not scoring().is_finished()
    scoring().run()
    rows = load_rows("rows")
    assert rows["completion"][:] == completions
    assert max(value for value in rows["rewards/vowels"][:] if value is not None) < 0.1


@pytest.mark.slow
def test_rewards_of_others_are_not_replaced_without_a_word():
    sampled()
    scoring().run()
    (rows,) = {shard.parent for shard in shards_of("rows")}
    manifest_free = rows.parent / "given"
    manifest_free.mkdir()
    for shard in shards_of("rows"):
        table = load_rows(shard)
        table.to_parquet(manifest_free / shard.name)
    with pytest.raises(ValueError, match="scored already"):
        Score(ScoreArguments(input="given", output_dir="new", reward_funcs=FUNCTIONS)).run()
    with pytest.raises(ValueError, match="no judge"):
        Score(ScoreArguments(input=sampled("others"), output_dir="others")).run()


@pytest.mark.slow
def test_evaluation_by_rewards(capsys):
    sampled(greedy=True)
    scoring().run()
    args = {"input": "rows", "use_cpu": True}
    evaluate_command(EvaluateArguments(output_dir="mean", **args))
    evaluate_command(EvaluateArguments(output_dir="passed", pass_threshold=0.3, **args))
    found = read_evaluation(Evaluate(EvaluateArguments(output_dir="passed", **args)).folder / EVALUATION)
    rewards = [row["reward"] for row in load_rows("rows") if row["temperature"] > 0]
    assert found.reward.value == pytest.approx(sum(rewards) / len(rewards))
    assert found.pass_at[1].value == pytest.approx(sum(reward >= 0.3 for reward in rewards) / len(rewards))
    assert set(found.best_reward_at) == {2, 4}
    assert found.greedy_reward is not None
    assert "best reward@4" in capsys.readouterr().out
    with pytest.raises(ValueError, match="scored already"):
        evaluate_command(EvaluateArguments(output_dir="again", reward_funcs=FUNCTIONS, **args))
    sampled("unscored", greedy=True)
    evaluate_command(
        EvaluateArguments(
            output_dir="two", reward_funcs=FUNCTIONS, use_cpu=True, input="unscored", compare="rows", pass_threshold=0.3
        )
    )
    assert "in units of the reward and in points" in capsys.readouterr().out
    evaluate_command(EvaluateArguments(output_dir="new", reward_funcs=FUNCTIONS, **{**args, "input": "unscored"}))
    assert read_evaluation(shards_of("new/scored")[0].parents[1] / EVALUATION).reward is not None


JUDGE = """
def judge(texts, answers):
    return [("correct", right) if right in text else ("invalid", None) for text, right in zip(texts, answers)]
"""


def test_a_judge_keeps_verdicts_and_answers(tmp_path):
    (tmp_path / "rewards.py").write_text(CODE + JUDGE)
    text = (tmp_path / "prompts.jsonl").read_text().replace("target", "answer")
    (tmp_path / "prompts.jsonl").write_text(text)
    sampled()
    Score(ScoreArguments(input="rows", output_dir="rows", reward_funcs=["rewards.py:judge"])).run()
    Evaluate(EvaluateArguments(input="rows", output_dir="results")).run()
    found = read_evaluation(tmp_path / "results" / EVALUATION)
    assert set(found.shares) == {"correct", "incorrect", "invalid"}
    assert found.reward is None  # Rewards of 1 and -1 add nothing to pass@1.


def test_a_judged_run_is_compared_with_a_graded_one():
    """Only one run has rewards, so accuracy is compared."""
    rows = {"prompt": ["a", "b"], "answer": ["1", "2"], "extracted": ["1", "3"]}
    Dataset.from_dict(rows).to_parquet("judged.parquet")
    Dataset.from_dict({**rows, "reward": [0.5, 2.0]}).to_parquet("graded.parquet")
    Evaluate(EvaluateArguments(input="graded.parquet", compare="judged.parquet", output_dir="results")).run()
    assert json.loads(Path("results/comparison.json").read_text())["differences"]["pass@1"]["difference"] == 0


def test_rewards_of_turns_are_no_rewards_of_rows():
    rows = {"prompt": ["a"], "completion": ["b"], "turn_rewards": [[1.0]]}
    Dataset.from_dict(rows).to_parquet("rated.parquet")
    with pytest.raises(ValueError, match=r"turn_rewards.*topr train"):
        Score(ScoreArguments(input="rated.parquet", output_dir="rows")).run()


def test_equal_models_by_other_paths_are_equal(tmp_path):
    shutil.copytree(arithmetic.CARELESS_MODEL, tmp_path / "model")
    (tmp_path / "link").symlink_to(tmp_path / "model")
    sampled(model_name_or_path="model")
    for name in ("./model", "link", f"../{tmp_path.name}/model", str(tmp_path / "model")):
        given = {"dataset_name": f"../{tmp_path.name}/prompts.jsonl", "task": "prompts", **SAMPLING}
        assert stage_of("sample", SampleArguments(output_dir="rows", model_name_or_path=name, **given)).is_finished()


def loop(**more):
    given = {"output_dir": "run", "dataset_name": "prompts.jsonl", "reward_funcs": FUNCTIONS, "use_cpu": True,
             "bf16": False}  # fmt: skip
    return IterateArguments(**{**given, **more})


def test_the_loop_tests_only_with_test_prompts():
    names = [step.stage.name for step in steps_of(loop())]
    assert names == ["sample", "score", "curate", "log-mu", "train"]
    tested = loop(test_dataset_name="prompts.jsonl", pass_threshold=0.5)
    names = [step.stage.name for step in steps_of(tested)]
    assert names.count("evaluate") == 2
    assert [s.stage.args.pass_threshold for s in steps_of(tested) if s.stage.name == "evaluate"] == [0.5, 0.5]
    assert len(list(steps_of(loop(test_dataset_name="prompts.jsonl", num_test_problems=0)))) == 5
    check(loop())
    with pytest.raises(ValueError, match="--test_dataset_name"):  # A loop without reward functions needs it.
        loop(reward_funcs=None)


def test_errors_after_sampling_are_found_before(tmp_path):
    with pytest.raises(ValueError, match="--reward_funcs"):
        check(loop(task="gsm8k", test_dataset_name="prompts.jsonl", reward_funcs=None))
    with pytest.raises(ValueError, match="1 values, and reward_funcs has 2"):
        loop(reward_weights=[1.0])
    assert loop(reward_weights=[1, "1e-1"]).reward_weights == [1.0, 0.1]  # YAML reads 1e-1 as text.
    with pytest.raises(ValueError, match=r"reward_weights must be numbers, not \[1, 'high'\]"):
        loop(reward_weights=[1, "high"])
    (tmp_path / "rewards.py").write_text(CODE.replace("target,", "solution,"))
    with pytest.raises(ValueError, match=r"'target_in' needs the column 'solution'.* target.* Rename"):
        check(loop())
    (tmp_path / "rewards.py").write_text(CODE)
    (tmp_path / "prompts.jsonl").write_text('{"question": "a", "target": "b"}')
    with pytest.raises(ValueError, match="column `prompt`"):
        check(loop())
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "target": "b", "reward": 1.0}')
    with pytest.raises(ValueError, match="column 'reward'"):
        check(loop())
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "target": "b"}')
    (tmp_path / "test.jsonl").write_text('{"prompt": "a", "target": "b", "problem_id": 7}\n' * 2)
    with pytest.raises(ValueError, match=r"2 test problems have the problem_id 7"):
        check(loop(test_dataset_name="test.jsonl"))
    (tmp_path / "prompts.csv").write_text("prompt,target\na,b\n")
    with pytest.raises(ValueError, match=r"\.parquet, \.json, \.jsonl, not prompts\.csv"):
        check(loop(dataset_name="prompts.csv"))


@pytest.mark.parametrize("column", ["reward", "label", "verdict", "mu_logps"])
def test_results_of_earlier_completions_are_not_copied(tmp_path, column):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "1 + 2 =", "answer": "3", column: 1.0}))
    with pytest.raises(ValueError, match=f"column '{column}'.*Rename or remove"):
        sampled(task="gsm8k")


def test_reward_models_and_threads_get_a_process():
    sampled()
    for names, in_thread, expected in (
        (FUNCTIONS, False, False), (FUNCTIONS, True, True), (["org/model"], False, True), (None, True, False),
    ):  # fmt: skip
        stage = Score(ScoreArguments(input="rows", output_dir="rows", reward_funcs=names))
        assert stage.needs_process(in_thread) == expected
        if names is not None:  # The process gets the same settings.
            parsed = parse("score", ["--config", str(write_settings(stage))])
            assert stage_of("score", parsed).inputs() == stage.inputs()


def test_given_rows_keep_their_rewards():
    scoring(sampled()).run()
    first, *others = [step.stage for step in steps_of(loop(rows="rows", iterations=2))]
    first.run()
    given, used = load_rows("rows"), load_rows(first.folder)
    assert {name: used[name][:] for name in given.column_names} == given.to_dict()
    assert [stage.args.reward_funcs for stage in others if stage.name == "score"] == [FUNCTIONS]


@pytest.mark.parametrize("reward_funcs", [None, FUNCTIONS])
def test_labels_of_given_rows_are_their_rewards(tmp_path, reward_funcs):
    texts = {"prompt": ["1 + 1 ="] * 4, "completion": [" 2", " 3"] * 2}
    save_rows(Dataset.from_dict({**texts, "label": [True, False] * 2}), "labels")
    given = loop(rows="labels", reward_funcs=reward_funcs, num_test_problems=0)
    check_trainable(Path("labels"), given)
    first = steps_of(given)[0].stage
    first.run()
    assert load_rows(first.folder)["reward_after_baseline"][:] == [1.0, -1.0] * 2


@pytest.mark.parametrize("column", ["reward", "label"])
@pytest.mark.parametrize("lacking", ["prompt", "completion"])
def test_rows_with_rewards_need_the_columns_that_training_needs(column, lacking):
    columns = {"prompt": ["a"], "completion": ["b"], column: [True]}
    del columns[lacking]
    save_rows(Dataset.from_dict(columns), "incomplete")
    with pytest.raises(ValueError, match=rf"(?s)rows-00000.*{lacking}.*found"):
        check_trainable(Path("incomplete"), loop(rows="incomplete"))
