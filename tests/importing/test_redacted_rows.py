"""Test `topr import --redact`."""

import json
import time

import pytest
from reading import imported
from records import CHAT, NEMO

from topr_trl.importing.format import Unusable
from topr_trl.importing.redacted_rows import redact_row
from topr_trl.recording.redaction import NAMED, Redactor

BLANK = "[redacted]"


@pytest.mark.parametrize(
    ("name", "texts", "others"),
    [
        ("emails", ["tom.cat+x@mail.example.co.uk", "a_b@example.org"], ["tom@localhost", "a @ b", "@property"]),
        ("phones", ["+49 (0)30 1234-5678", "(555) 123-4567", "555-123-4567", "+15551234567", "030 12345678"],
         ["1234567", "2024-01-15", "3.14159", "1,234,567", "192.168.100.100", "12 345 678", "1 + 1 = 2", "0.5-0.25"]),
        ("keys", ["sk-ant-api03-abcdefghijklmnop", "hf_abcdefghijklmnopqrst", "AKIAABCDEFGHIJKLMNOP",
                  "Bearer abcdefghijklmnopqrstuv", "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
                  "-----BEGIN RSA PRIVATE KEY-----\nMIIabc+/=\n-----END RSA PRIVATE KEY-----"],
         ["sk-learn", "scikit-learn-is-a-long-name", "the bearer of bad news", "task-1234567890123456789"]),
    ],
)  # fmt: skip
def test_names_of_patterns(name, texts, others):
    redactor = Redactor([name])
    assert [redactor(f"is {text}, or") for text in texts] == [f"is {BLANK}, or"] * len(texts)
    assert [redactor(f"is {text}, or") for text in others] == [f"is {text}, or" for text in others]


@pytest.mark.parametrize(
    "part", ["a", "1", "+1 ", "eyJaaaaaaaa.", "sk-", "a@", "-----BEGIN PRIVATE KEY-----", "a.b@c."]
)
def test_patterns_take_linear_time(part):
    redactor, start = Redactor([*NAMED]), time.process_time()
    redactor(part * (1_000_000 // len(part)))
    assert time.process_time() - start < 5  # measured: 0.2 s; a quadratic pattern takes hours


def test_matches_are_blanked_out_and_counted(tmp_path, capsys):
    asked = {"role": "user", "content": "I am tom@example.org. Key: k-123."}
    tool = {"type": "function", "function": {"name": "write", "description": "Writes to al@example.org", "n": 5551234}}
    record = {**CHAT, "request": {**CHAT["request"], "messages": [asked], "tools": [tool]}}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(record)}\n{json.dumps(CHAT)}\n")
    given = ("--reward_fields", "reward", "--redact", "emails", r"k-\d+")
    rows = imported(tmp_path, tmp_path / "a.jsonl", *given)
    assert [row["prompt"][-1]["content"] for row in rows][::2] == [f"I am {BLANK}. Key: {BLANK}.", "6*7?"]
    assert [bool(row["completion_ids"]) for row in rows] == [False, False, True, False]
    assert json.loads(rows[0]["tools"])[0]["function"]["description"] == f"Writes to {BLANK}"
    assert "2 rows have text that --redact blanked out, and no token ids" in capsys.readouterr().out


def test_arguments_that_become_invalid_are_left_out(tmp_path, capsys):
    call = {"id": "c1", "type": "function", "function": {"name": "dial", "arguments": '{"to": 555-123-4567}'}}
    row = {"messages": [{"role": "user", "content": "Call."}, {"role": "assistant", "tool_calls": [call]}], "reward": 1}
    said = {"messages": [{"role": "user", "content": "Call."}, {"role": "assistant", "content": "Done."}], "reward": 1}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(said)}\n")
    rows = imported(tmp_path, tmp_path / "a.jsonl", "--redact", "phones")
    assert [row["completion"][0]["content"] for row in rows] == ["Done."]
    assert "1 completion without token ids has a tool call" in capsys.readouterr().out


def test_rows_that_cannot_be_redacted(tmp_path):
    with pytest.raises(Unusable, match=r"redact .* token ids have no text"):
        redact_row({"prompt": "", "prompt_ids": [1], "completion": "a", "completion_ids": [2]}, Redactor(["b"]))
    (tmp_path / "a.jsonl").write_text(json.dumps(NEMO))
    with pytest.raises(ValueError, match=r"token ids mark context.*--skip_unusable"):
        imported(tmp_path, tmp_path / "a.jsonl", "--redact", "42")
