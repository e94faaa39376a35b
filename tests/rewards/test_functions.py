import asyncio
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification
from trl import GRPOConfig, GRPOTrainer

from topr_trl import reward_completions
from topr_trl.rewards import functions
from topr_trl.rewards.functions import prepare_rewards
from topr_trl.sandbox import run_tests
from topr_trl.tasks import arithmetic, gsm8k

MESSAGES = [{"role": "user", "content": "Say hi."}]


@pytest.fixture
def rows():
    return Dataset.from_dict({
        "prompt": ["a", "a", "b", "b"],
        "completion": ["1", "22", "333", ""],
        "completion_ids": [[1], [2, 2], [3, 3, 3], [4]],
        "target": ["1", "1", "2", "2"],
    })  # fmt: skip


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


async def later(completions, target, **kwargs):
    await asyncio.sleep(0)
    return [None if not text else float(text == right) for text, right in zip(completions, target, strict=True)]


def test_weighted_sum_without_those_that_do_not_apply(rows):
    found = reward_completions(rows, [length, later], [0.5, 2.0])
    assert found["rewards/length"][:] == [1.0, 2.0, 3.0, 0.0]
    assert found["rewards/later"][:] == [1.0, 0.0, 0.0, None]
    assert found["reward"][:] == [2.5, 1.0, 1.5, 0.0]


def test_no_reward_where_no_function_applies(rows):
    found = reward_completions(rows, later)
    assert found["reward"][:] == [1.0, 0.0, 0.0, None]
    assert "rewards/later" not in found.column_names


def test_functions_get_what_trl_passes(rows, tmp_path):
    """A reward function gets the same argument names and completions as from GRPOTrainer, for the same rows."""
    seen = []

    def spy(**kwargs):
        seen.append(kwargs)
        return [0.0] * len(kwargs["prompts"])

    for prompts in (["a", "b"], [MESSAGES, MESSAGES]):
        problems = Dataset.from_dict({"prompt": prompts, "target": ["1", "2"]})
        tokenizer = AutoTokenizer.from_pretrained(arithmetic.CARELESS_MODEL)
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        args = GRPOConfig(
            str(tmp_path), num_generations=2, per_device_train_batch_size=2, max_completion_length=2, max_steps=1,
            report_to="none", use_cpu=True, bf16=False, disable_tqdm=True,
        )  # fmt: skip
        GRPOTrainer(str(arithmetic.CARELESS_MODEL), spy, args, problems, processing_class=tokenizer).train()
        of_trl = seen[-1]
        completed = problems.select([0, 0]).add_column("completion", of_trl["completions"])
        reward_completions(completed.add_column("completion_ids", of_trl["completion_ids"]), spy)
        assert set(seen[-1]) == set(of_trl)
        assert seen[-1]["completions"] == of_trl["completions"]
        assert type(seen[-1]["trainer_state"]) is type(of_trl["trainer_state"])


def test_text_after_messages_becomes_a_message():
    rows = Dataset.from_dict({"prompt": [MESSAGES], "completion": ["hi"]})
    assert reward_completions(rows, lambda completions, **_: [len(completions[0][0]["content"])])["reward"][:] == [2.0]


def test_calls_keep_the_completions_of_a_problem_together(rows, monkeypatch):
    monkeypatch.setattr(functions, "_AT_ONCE", 3)
    sizes = []

    def count(prompts, **kwargs):
        sizes.append(prompts)
        return [1.0] * len(prompts)

    reward_completions(rows, count)
    assert sizes == [["a", "a"], ["b", "b"]]


def test_a_judge_gives_verdicts(rows):
    rows = rows.rename_column("target", "answer").map(lambda row: {"completion": f"The answer is {row['completion']}."})
    found = reward_completions(rows, [gsm8k.judge, length], [1.0, 0.0])
    assert found["verdict"][:] == ["correct", "incorrect", "incorrect", "invalid"]
    assert found["extracted"][:] == ["1", "22", "333", None]
    assert found["reward"][:] == found["rewards/judge"][:] == [1.0, -1.0, -1.0, -1.0]


@pytest.mark.parametrize("judge", [lambda texts, answer: [], lambda programs, target: [], run_tests])
def test_judges_may_name_their_parameters_like_columns(rows, judge):
    columns = [*rows.column_names, "answer", "tests"]
    assert [reward.kind for reward in prepare_rewards([judge], columns)] == ["judge"]


def test_a_reward_function_without_its_column_is_no_judge(rows):
    with pytest.raises(ValueError, match="column 'solutions'"):
        prepare_rewards([lambda solutions, completions: []], [*rows.column_names, "answer"])


@pytest.fixture
def reward_model(tmp_path):
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(arithmetic.CARELESS_MODEL)
    config = Qwen2Config(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2, num_labels=1)  # fmt: skip
    Qwen2ForSequenceClassification(config).save_pretrained(tmp_path / "scorer")
    tokenizer.save_pretrained(tmp_path / "scorer")
    return str(tmp_path / "scorer")


def test_a_reward_model_scores_prompt_and_completion(rows, reward_model):
    found = reward_completions(rows, reward_model)["reward"][:]
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    model = Qwen2ForSequenceClassification.from_pretrained(reward_model)
    model.config.pad_token_id = tokenizer.pad_token_id
    with torch.no_grad():
        expected = [
            model(**tokenizer(text=row["prompt"] + row["completion"], return_tensors="pt")).logits.item()
            for row in rows
        ]
    assert found == pytest.approx(expected, abs=1e-5)
    assert len(set(found)) == 4


def test_a_model_without_a_trained_score_is_no_reward_model(rows, tmp_path):
    AutoModelForCausalLM.from_pretrained(arithmetic.CARELESS_MODEL).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no trained score\.weight.*reward model"):
        reward_completions(rows, str(tmp_path))


def test_names_of_reward_models_in_folders(rows, reward_model):
    found = reward_completions(rows, [f"{reward_model}/", length])
    assert "rewards/scorer" in found.column_names


@pytest.mark.parametrize("style", ['{"style": "1"}', {"style": "1"}])
def test_a_reward_model_reads_imported_messages(rows, reward_model, style):
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    tokenizer.chat_template = (
        "{{ style }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}"
        "{% endfor %}{% endfor %}"
    )
    tokenizer.save_pretrained(reward_model)
    call = {"function": {"name": "f", "arguments": '{"x": "22"}'}}
    messages = {
        "prompt": [[{"role": "user", "content": "a", "tool_calls": None}]],
        "completion": [[{"role": "assistant", "content": None, "tool_calls": [call]}]],
        "chat_template_kwargs": [style],
    }
    text = {"prompt": ["1a"], "completion": ["22"]}
    expected = reward_completions(Dataset.from_dict(text), reward_model)["reward"][0]
    assert reward_completions(Dataset.from_dict(messages), reward_model)["reward"][0] == expected
    messages["completion"][0][0]["tool_calls"][0]["function"]["arguments"] = "{"
    with pytest.raises(ValueError, match=r"'scorer' cannot read completion 0: .*not valid JSON"):
        reward_completions(Dataset.from_dict(messages), reward_model)


def test_a_reward_model_is_not_read_from_pickles(rows, reward_model):
    weights = load_file(f"{reward_model}/model.safetensors")
    torch.save(weights, f"{reward_model}/pytorch_model.bin")
    Path(f"{reward_model}/model.safetensors").unlink()
    with pytest.raises(OSError, match="safetensors"):
        reward_completions(rows, reward_model)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda completions, solution, **_: [], "'solution'"),
        (lambda completions: [], "**kwargs"),
        (lambda completions, **_: [1.0], "1 rewards for 4 completions"),
        (lambda completions, **_: ["good"] * 4, "'good' for completion 0"),
        (lambda completions, **_: [1.0, float("inf"), 1.0, 1.0], "inf for completion 1"),
        (lambda completions, **_: torch.ones(4, 2), "tensor([1., 1.]) for completion 0"),
        (lambda completions, **_: [[1.0, None]] * 4, "turn_rewards"),
        (lambda completions, **_: [10**400] * 4, "for completion 0. Return a finite number"),
        (lambda completions, **_: 1.0, "not a list"),
        (lambda completions, **_: [1 / 0], "failed with ZeroDivisionError"),
        (lambda texts, truths: [], "`answer`"),
        (3, "functions, models or names"),
    ],
)
def test_results_that_a_function_must_not_return(rows, function, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        reward_completions(rows, function)


@pytest.mark.parametrize(
    ("function", "where"),
    [
        (lambda completions, **_: [float("nan") if text == "333" else 1.0 for text in completions], "completion 2"),
        (lambda completions, **_: ["good" if text == "333" else 1.0 for text in completions], "completion 2"),
        (lambda texts, truths: [1.0 if text == "333" else ("correct", text) for text in texts], "completion 2"),
    ],
)
def test_errors_count_the_rows_of_all_calls(rows, function, where, monkeypatch):
    monkeypatch.setattr(functions, "_AT_ONCE", 2)
    with pytest.raises(ValueError, match=where):
        reward_completions(rows.rename_column("target", "answer"), function)


def test_answers_are_checked_before_a_judge_is_called(rows, monkeypatch):
    monkeypatch.setattr(functions, "_AT_ONCE", 2)
    rows = rows.remove_columns("target").add_column("answer", ["1", "1", "2", None])
    with pytest.raises(ValueError, match="row 3"):
        reward_completions(rows, lambda texts, truths: pytest.fail("called"))


@pytest.mark.parametrize("verdict", [1.0, ("good", "7")])
def test_a_judge_must_return_verdicts(rows, verdict):
    rows = rows.rename_column("target", "answer")
    with pytest.raises(ValueError, match=r"for completion 0.*correct, incorrect, invalid"):
        reward_completions(rows, lambda texts, truths: [verdict] * len(texts))


def test_weights_and_names(rows):
    with pytest.raises(ValueError, match="1 values, and reward_funcs has 2"):
        reward_completions(rows, [length, later], [1.0])
    with pytest.raises(ValueError, match="reward_funcs is empty"):
        reward_completions(rows, [])
    with pytest.raises(ValueError, match="'length'"):
        prepare_rewards([length, partial(length)], rows.column_names)
    with pytest.raises(ValueError, match="two judges"):
        prepare_rewards([gsm8k.judge, lambda texts, truths: []], [*rows.column_names, "answer"])
    for name in ("reward", "rewards/length"):
        with pytest.raises(ValueError, match=f"already have a column '{name}'"):
            reward_completions(rows.add_column(name, [1.0] * 4), length)
