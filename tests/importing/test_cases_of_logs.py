"""Test what is learned from the files of other systems in `../shared/cases/logs`.

Earlier versions learned these files wrongly or not at all. The tokenizers come from `tiny.py` in the same folder, with
chat templates that ship with TRL.
"""

import re
import runpy
import sys
from itertools import groupby
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from topr_trl import load_rows
from topr_trl.cli import main
from topr_trl.data.rows import reward_column
from topr_trl.data.tokenization import tokenize_row

CASES = Path(__file__).parents[3] / "shared" / "cases" / "logs"
SECOND_CASES = CASES.with_name("logs_2")
pytestmark = pytest.mark.skipif(not SECOND_CASES.is_dir(), reason="../shared/cases/logs_2 is not there")

QUESTION = "How many legs have 3 cats?"
ASKED = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
SYSTEM = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
OF_R1 = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
NO_THINKING = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Return a function that returns the folder of a tiny model with the given chat template."""
    made = {}

    def model_of(template):
        if template not in made:
            folder = made[template] = str(tmp_path_factory.mktemp(template))
            given, sys.argv = sys.argv, ["tiny.py", template, folder]
            try:
                runpy.run_path(str(CASES / "tiny.py"))
            finally:
                sys.argv = given
        return made[template]

    return model_of


@pytest.fixture
def imported(tmp_path, capsys):
    """Return a function that imports a case, and returns its rows and the printed text."""

    def imported(case, name, *settings):
        command = ["import", "--format", name, "--input", str(CASES / f"{case}.jsonl")]
        main.main([*command, "--output_dir", str(tmp_path / "rows"), *settings])
        return load_rows(tmp_path / "rows"), capsys.readouterr().out

    return imported


@pytest.fixture
def read(model_of):
    """Return a function that returns the text of a row's prompt and completion, with learned text between ⟪ and ⟫."""

    def read(row, template):
        tokenizer = AutoTokenizer.from_pretrained(model_of(template))
        made = tokenize_row(row, tokenizer)
        own = made.completion_mask or [True] * len(made.completion_ids)
        parts = groupby(zip(made.completion_ids, own, strict=True), key=lambda pair: pair[1])
        texts = ((is_own, tokenizer.decode([token for token, _ in part])) for is_own, part in parts)
        completion = "".join(f"⟪{text}⟫" if is_own else text for is_own, text in texts)
        return tokenizer.decode(made.prompt_ids), completion

    return read


SCORE = ("--reward_fields", "score")


@pytest.mark.parametrize(
    ("template", "prompt", "completions"),
    [
        ("deepseek_r1_distill", f"{OF_R1[0]}<｜User｜>{QUESTION}<｜Assistant｜><think>\n",
         [f"⟪Four legs each, three cats.\n</think>\n\n12{OF_R1[1]}⟫", f"⟪Four plus three.\n</think>\n\n7{OF_R1[1]}⟫"]),
        ("qwen3", ASKED, ["⟪<think>\nFour legs each, three cats.\n</think>\n\n12<|im_end|>⟫",
                          "⟪<think>\nFour plus three.\n</think>\n\n7<|im_end|>⟫"]),
        ("qwen3_5_think", f"{ASKED}<think>\n", ["⟪Four legs each, three cats.\n</think>\n\n12<|im_end|>⟫",
                                                "⟪Four plus three.\n</think>\n\n7<|im_end|>⟫"]),
    ],
)  # fmt: skip
def test_reasoning_is_learned(imported, read, template, prompt, completions):
    rows, _ = imported("reasoning_dropped", "openai", *SCORE)
    assert [read(row, template) for row in rows] == [(prompt, completion) for completion in completions]


@pytest.mark.parametrize(
    ("template", "opened", "end"),
    [("qwen3", "<think>\n", "<|im_end|>"), ("qwen3_5_think", "", "<|im_end|>"), ("deepseek_r1_distill", "", OF_R1[1])],
)
def test_thinking_ends_where_it_was_cut(imported, read, template, opened, end):
    rows, _ = imported("cut_thinking", "openai", *SCORE)
    assert [read(row, template)[1] for row in rows] == [
        f"⟪{opened}Four legs each.\n</think>\n\n12{end}⟫", f"⟪{opened}Let me count the le⟫",
        f"⟪{opened}Four plus three.\n</think>\n\n7{end}⟫",
    ]  # fmt: skip


@pytest.mark.parametrize("case", ["cut_thinking", "cut_thinking_last"])
def test_cut_thinking_that_a_template_does_not_write_is_refused(imported, read, model_of, tmp_path, case):
    rows, _ = imported(case, "openai", *SCORE)
    with pytest.raises(ValueError, match="'Let me count the le'"):
        read(rows[1], "qwen2_5")
    rows.select([1, 0]).to_json(tmp_path / "cut.jsonl")
    command = ["train", "--input", str(tmp_path / "cut.jsonl"), "--model_name_or_path", model_of("qwen2_5")]
    with pytest.raises(ValueError, match=r"Row 0 of the train dataset: .*'Let me count the le'"):
        main.main([*command, "--output_dir", str(tmp_path / "out"), "--use_cpu", "True", "--bf16", "False",
                   "--max_steps", "2"])  # fmt: skip


@pytest.mark.parametrize("template", ["qwen3", "qwen3_5_think"])
def test_a_request_without_thinking(imported, read, template):
    rows, _ = imported("no_thinking", "openai", *SCORE)
    expected = [(ASKED + NO_THINKING, f"⟪{answer}<|im_end|>⟫") for answer in (12, 7)]
    assert [read(row, template) for row in rows] == expected


def test_a_label_of_the_last_turn(imported, read, tmp_path):
    rows, said = imported("last_turn_label", "messages", "--reward_fields", "label")
    assert "2 rows have several turns of the model, which all get the reward" in said
    assert "--completion last_turn" in said
    again = "<|im_start|>user\nAgain, please: and 4 cats?<|im_end|>\n<|im_start|>assistant\n"
    expected = [f"⟪EARLIER<|im_end|>⟫\n{again}⟪{answer}<|im_end|>⟫" for answer in (16, 8)]
    assert [read(row, "qwen2_5")[1] for row in rows] == expected
    settings = ("--reward_fields", "label", "--completion", "last_turn", "--output_dir", str(tmp_path / "last"))
    _, said = imported("last_turn_label", "messages", *settings)
    assert "2 rows have several turns of the model, and only the last turn is trained on" in said
    prompt = f"{SYSTEM}<|im_end|>\n{ASKED}EARLIER<|im_end|>\n{again}"
    expected = [(prompt, f"⟪{answer}<|im_end|>⟫") for answer in (16, 8)]
    rows = load_rows(tmp_path / "last")
    assert [read(row, "qwen2_5") for row in rows] == expected
    assert rows["reward"][:] == [1.0, -1.0]


def test_a_text_that_has_the_bos_token(read):
    for row, answer in zip(load_rows(CASES / "bos_text.jsonl"), (12, 7), strict=True):
        assert read(row, "llama3") == (row["prompt"], f"⟪{answer}<|eot_id|>⟫")


def test_results_of_old_verifiers(imported, read):
    rows, _ = imported("verifiers_old", "verifiers-results")
    call = '<tool_call>\n{"name": "legs", "arguments": {"animal": "cat"}}\n</tool_call><|im_end|>'
    result = "\n<|im_start|>user\n<tool_response>\nFOUR\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert [read(row, "qwen2_5")[1] for row in rows] == [f"⟪{call}⟫{result}⟪{n}<|im_end|>⟫" for n in (12, 7)]
    assert '{"name": "legs", "description": "Legs of an animal.", "parameters": ' in read(rows[0], "qwen2_5")[0]
    assert (rows["reward"][:], rows["problem_id"][:], rows["answer"][:]) == ([1.0, 0.0], ["0", "0"], ["12", "12"])


def test_pairs_become_two_rows(model_of, tmp_path, capsys):
    with pytest.raises(ValueError, match=r"preference pairs.* two rows of each pair.*extract_prompt"):
        reward_column(load_rows(CASES / "pairs.jsonl"))
    main.main(["train", "--input", str(CASES / "pairs.jsonl"), "--model_name_or_path", model_of("qwen2_5"),
               "--output_dir", str(tmp_path / "out"), "--use_cpu", "True", "--bf16", "False",
               "--max_steps", "2"])  # fmt: skip
    assert "Each pair is two rows" in capsys.readouterr().out
    assert load_rows(tmp_path / "out" / "imported")["reward"][:] == [1.0, -1.0]


@pytest.mark.parametrize(
    ("name", "given", "prompt", "answers", "rewards"),
    [
        ("feedback.csv", (), ASKED, ["12", "7"], [5.0, 1.0]),
        ("pairs.jsonl", (), ASKED, ["12", "7"], [1.0, -1.0]),
        ("sharegpt.jsonl", SCORE, ASKED, ["12", "7"], [1.0, 0.0]),
        ("responses_api.jsonl", (*SCORE, "--requests", str(CASES / "responses_requests.jsonl")), ASKED,
         ["12", "7"], [1.0, 0.0]),
        ("nemo_gym.jsonl", (), ASKED, ["12", "7"], [1.0, 0.0]),
        ("completions_api.jsonl", SCORE, "3 cats have this many legs:", [" 12", " 7"], [1.0, 0.0]),
        ("lm_eval_samples.jsonl", (), f"Question: {QUESTION}\nAnswer:", [" #### 12", " #### 7"], [1.0, 0.0]),
    ],
)  # fmt: skip
def test_rows_learned_from_other_formats(name, given, prompt, answers, rewards, read, tmp_path):
    main.main(["import", "--input", str(CASES / name), "--output_dir", str(tmp_path / "rows"), *given])
    rows = load_rows(tmp_path / "rows")
    assert rows["reward"][:] == rewards
    for row, answer in zip(rows, answers, strict=True):
        asked, said = read(row, "qwen2_5")
        assert asked.endswith(prompt)
        assert asked.count(prompt) == 1
        assert said == f"⟪{answer}<|im_end|>⟫"


HISTORY = "Legs of a cat? | EARLIER four. | And of three cats?"


@pytest.mark.parametrize(
    ("name", "given", "prompts", "answers", "rewards"),
    [
        ("gold_as_completion.csv", "--reward_fields correct", "Legs of 2 cats?", ["PRED eight", "PRED fifteen"],
         [1, -1]),
        ("gold_as_completion.csv", "--reward_fields correct --completion_field prediction", "Legs of 2 cats?",
         ["PRED eight", "PRED fifteen"], [1, -1]),
        ("deepeval.jsonl", "", "Legs of 2 cats?", ["PRED 8", "PRED 15"], [1, 0]),
        ("qwen_math_eval.jsonl", "--completion_field code", "Legs of 2 cats?", ["PRED 8", "PRED 15"], [1, -1]),
        *((f"{name}.jsonl", "--reward_fields score", HISTORY, ["NEW 12", "NEW 15"], [1, 0])
          for name in ("helicone", "generic_log", "weave", "opik", "portkey")),
        ("gemini_log.jsonl", "--reward_fields score",
         "Answer in DIGITS. | Legs of a cat? | EARLIER four. | And of three?", ["NEW 12", "NEW 15"], [1, 0]),
        ("bedrock_log.jsonl", "--reward_fields score", "Legs of three cats?", ["NEW 12", "NEW 15"], [1, 0]),
        ("anthropic_log.jsonl", "--reward_fields score", f"Answer in DIGITS. | {HISTORY}", ["NEW 12", "NEW 15"],
         [1, 0]),
        ("anthropic_messages.jsonl", "", "Answer in DIGITS. | Legs of my cat Tom?",
         ["I look it up. | TOOL-FOUR | 4", "I look it up. | TOOL-FOUR | 5"], [1, 0]),
        ("history_and_answer.jsonl", "--reward_fields score --prompt_field messages --completion_field answer",
         HISTORY, ["NEW 12", "NEW 15"], [1, 0]),
        ("history_and_output.jsonl", "--prompt_field messages --completion_field output.content",
         HISTORY, ["NEW 12", "NEW 15"], [1, 0]),
        ("ends_with_user.jsonl", "--reward_fields score", "Legs of a cat?", ["four | Thanks!"] * 2, [1, 0]),
        ("dolly.csv", "--prompt_field context instruction", "CONTEXT Tom and Tim are cats.\n\nHow many legs?",
         ["8", "8"], [1, -1]),
        ("alpaca_scored.json", "--prompt_field instruction input", "Count the legs.\n\nINPUT 2 cats", ["12", "12"],
         [0, 1]),
        ("swe_demo.traj", "--reward_fields resolved", "s | Legs of a dog? | DEMO 4 | Legs of Tom?", ["4"], [1]),
        *(("openwebui_feedback.json", given, "Legs of three cats?", ["RATED 12", "RATED 12"], [1, -1])
          for given in ("", "--messages_field snapshot.chat.chat.messages --reward_fields data.rating")),
        ("librechat.json", "", "Legs of a cat?", ["4"], [1]),
        ("braintrust.jsonl", "--reward_fields scores.right", "Legs of three cats?", ["12", "15"], [1, 0]),
        ("braintrust_history.jsonl", "--reward_fields scores.right", HISTORY, ["NEW 12", "NEW 15"], [1, 0]),
        ("lists.jsonl", "", "Legs of 2 cats?", ["8", "10", "12", "15"], [1, 0, 1, 0]),
        ("responses_scores.jsonl", "", "Legs of 2 cats?", ["8", "10", "12", "15"], [1, 0, 1, 0]),
        ("string_records.jsonl", "--format openai --reward_fields score", QUESTION, ["12", "7"], [1, 0]),
        ("ultrafeedback.jsonl", "", "Legs of 2 cats?", ["8", "10", "12", "15"], [9, 2, 9, 2]),
        *((name, "", "Legs of 2 cats?", ["8", "10", "12", "15"], [1, -1, 1, -1])
          for name in ("openai_dpo.jsonl", "arena.jsonl", "lf_sharegpt_dpo.json", "swift_dpo.jsonl", "ab.csv")),
        ("messages_chosen.jsonl", "", "Answer in DIGITS. | MESSAGES legs of 2 cats?", ["8", "10", "12", "15"],
         [1, -1, 1, -1]),
        ("argilla.json", "--prompt_field fields.prompt --completion_field fields.response --reward_fields "
         "responses.rating.0.value", "Legs of a cat?", ["4"], [5]),
        ("label_studio.json", "--prompt_field data.prompt --completion_field data.response --reward_fields "
         "annotations.0.result.0.value.rating", "Legs of a cat?", ["4"], [5]),
        ("argilla.json", "", "Legs of a cat?", ["4"], [5]),
        ("label_studio.json", "", "Legs of a cat?", ["4"], [5]),
        ("oaieval.jsonl", "", "Legs of 2 cats?", ["8"], [1]),
        ("promptfoo.json", "", "Legs of 2 cats?", ["8"], [1]),
        ("lf_kto.json", "--reward_fields kto_tag", "Legs of 2 cats?", ["12", "12"], [-1, 1]),
        ("helpsteer.jsonl", "--reward_fields correctness", "Legs of 2 cats?", ["8", "12"], [2, 3]),
        ("likes.csv", "--skip_unrewarded", "Legs of a cat?", ["4", "9"], [1, 0]),
    ],
)  # fmt: skip
def test_the_right_text_is_learned(name, given, prompts, answers, rewards, tmp_path):
    """The prompt is that of the first row."""
    main.main(["import", "--input", str(SECOND_CASES / name), "--output_dir", str(tmp_path / "rows"), *given.split()])
    rows = load_rows(tmp_path / "rows")
    said = [[" | ".join(turn["content"] for turn in row[part]) for row in rows] for part in ("prompt", "completion")]
    assert (said[0][0], said[1], rows["reward"][:]) == (prompts, answers, rewards)


TOOL = '<tool_call>\n{"name": "legs", "arguments": {"cat": "Tom"}}\n</tool_call><|im_end|>'
THOUGHT = "<think>\nHm.\n</think>\n\n"


@pytest.mark.parametrize(
    ("name", "prompt", "learned"),
    [
        ("atif.json", "Legs of Tom?", [f"{THOUGHT}I look.\n{TOOL}", "4<|im_end|>"]),
        ("claude_code.jsonl", "Legs of Tom?", [TOOL, "4<|im_end|>"]),
        ("codex.jsonl", "Legs?", ["4<|im_end|>"]),
        ("bare_messages.json", "Legs of Tom?", ["4<|im_end|>"]),
        ("tau2.json", "Legs of Tom?", [TOOL, "4<|im_end|>"]),
    ],
)
def test_what_is_learned_of_agents(name, prompt, learned, read, tmp_path):
    """The prompt is that of the first row."""
    main.main(["import", "--input", str(SECOND_CASES / name), "--output_dir", str(tmp_path / "rows")])
    (asked, first), *others = (read(row, "qwen3") for row in load_rows(tmp_path / "rows"))
    assert f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n" in asked
    answered = "".join([first, *(completion for _, completion in others)])
    assert re.findall("⟪(.*?)⟫", answered, re.DOTALL) == learned


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ends_with_user.jsonl", "2 rows end with a turn of the user, which is not learned"),
        ("nan_text.csv", "3 prompts or completions are words for a missing value, such as nan"),
        ("no_rating.csv", "There are no rewards"),
        ("human_bot.csv", "Not read: thumbs_up, thumbs_down"),
    ],
)
def test_the_summary_says_it(name, words, tmp_path, capsys):
    main.main(["import", "--input", str(SECOND_CASES / name), "--output_dir", str(tmp_path / "rows")])
    assert words in capsys.readouterr().out
