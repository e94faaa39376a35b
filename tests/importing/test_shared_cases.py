"""The cases of `../shared/cases/logs` in the formats that could not be read: what the trainer learns, exactly."""

from itertools import groupby
from pathlib import Path

import pytest
import trl

from topr_trl import load_rows
from topr_trl.cli import main
from topr_trl.data.tokenization import tokenize_row

CASES = Path(__file__).parents[3] / "shared" / "cases" / "logs"
pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason=f"{CASES} is not on this machine")
SCORE = ("--reward_fields", "score")
QUESTION = "How many legs have 3 cats?"
CHAT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def qwen(tool_tokenizer):
    """A tokenizer with the template of Qwen2.5."""
    template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
    tool_tokenizer.chat_template = template.read_text()
    return tool_tokenizer


def learned(row, tokenizer):
    """Prompt and completion as text; what is learned is between ⟪ and ⟫."""
    made = tokenize_row(row, tokenizer)
    own = made.completion_mask or [True] * len(made.completion_ids)
    parts = groupby(zip(made.completion_ids, own, strict=True), lambda pair: bool(pair[1]))
    texts = [(is_own, tokenizer.decode([token for token, _ in part])) for is_own, part in parts]
    return tokenizer.decode(made.prompt_ids), "".join(f"⟪{text}⟫" if is_own else text for is_own, text in texts)


@pytest.mark.parametrize(
    ("name", "given", "prompt", "answers", "rewards"),
    [
        ("feedback.csv", (), CHAT, ["12", "7"], [5.0, 1.0]),
        ("pairs.jsonl", (), CHAT, ["12", "7"], [1.0, -1.0]),
        ("sharegpt.jsonl", SCORE, CHAT, ["12", "7"], [1.0, 0.0]),
        ("responses_api.jsonl", (*SCORE, "--requests", str(CASES / "responses_requests.jsonl")), CHAT,
         ["12", "7"], [1.0, 0.0]),
        ("nemo_gym.jsonl", (), CHAT, ["12", "7"], [1.0, 0.0]),
        ("completions_api.jsonl", SCORE, "3 cats have this many legs:", [" 12", " 7"], [1.0, 0.0]),
        ("lm_eval_samples.jsonl", (), f"Question: {QUESTION}\nAnswer:", [" #### 12", " #### 7"], [1.0, 0.0]),
    ],
)  # fmt: skip
def test_what_is_learned(name, given, prompt, answers, rewards, qwen, tmp_path):
    main.main(["import", "--input", str(CASES / name), "--output_dir", str(tmp_path / "rows"), *given])
    rows = load_rows(tmp_path / "rows")
    assert rows["reward"][:] == rewards
    for row, answer in zip(rows, answers, strict=True):
        asked, said = learned(row, qwen)
        assert asked.endswith(prompt)
        assert asked.count(prompt) == 1
        assert said == f"⟪{answer}<|im_end|>⟫"


@pytest.mark.parametrize("given", [(), ("--format", "messages"), ("--messages_field", "history")])
def test_one_document(given, qwen, tmp_path):
    main.main(["import", "--input", str(CASES / "pretty.traj.json"), "--output_dir", str(tmp_path / "rows"), *given])
    (row,) = load_rows(tmp_path / "rows")
    assert learned(row, qwen)[1] == "⟪12<|im_end|>⟫"


@pytest.mark.parametrize(
    ("name", "named", "likely"),
    [
        ("nemo_gym.jsonl", "openai", "nemo-gym"),
        ("feedback.csv", "messages", "table"),
        ("pairs.jsonl", "table", "pairs"),
    ],
)
def test_an_error_names_the_format(name, named, likely, tmp_path):
    with pytest.raises(ValueError, match=rf"it looks like {likely} .*Use --format {likely}, or leave"):
        main.main(["import", "--format", named, "--input", str(CASES / name), "--output_dir", str(tmp_path / "rows")])
