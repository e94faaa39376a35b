"""The format of a file is recognized from its first records."""

import json
from pathlib import Path

import pytest
from records import EXAMPLES

from topr_trl.cli import main
from topr_trl.importing import FORMATS
from topr_trl.importing.recognition import format_of, recognize

WRITTEN = Path(__file__).parent / "written"
OF_FILES = {
    "inspect-0.3.285.eval": "inspect", "inspect-0.3.285.json": "inspect", "lm-eval-0.4.13-chat.jsonl": "lm-eval",
    "vllm-0.30.0.jsonl": "openai", "verifiers-0.3.1/results.jsonl": "verifiers-results",
    "verifiers-0.4.0/traces.jsonl": "verifiers",
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_has_its_format(name):
    assert format_of(EXAMPLES[name]) == name


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_two_formats_of_a_rank_recognize_an_example(name):
    """The order of two tests with the same rank means nothing."""
    ranks = [each.rank for each in FORMATS.values() if each.test(EXAMPLES[name])]
    assert ranks.count(min(ranks)) == 1


def test_every_format_has_an_example():
    assert set(EXAMPLES) == set(FORMATS)


@pytest.mark.parametrize("name", OF_FILES)
def test_files_that_other_programs_wrote(name):
    assert recognize(WRITTEN / name) == OF_FILES[name]


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ({"messages": [{"role": "user", "content": "a"}], "response": {"choices": [{"message": {}}]}}, "openai"),
        ({"custom_id": "a", "response": None, "error": {}}, "openai"),
        ({"prompt": "a", "completion": "b", "reward": 1, "example_id": 3}, "verifiers-results"),
        ({"prompt": "a", "completion": "b", "reward": 1}, "table"),
        ({"prompt": [{"role": "assistant", "content": "b"}], "response": "c"}, "table"),
        ({"info": {"traj": [{"role": "assistant", "content": "b"}]}}, "messages"),
        ({"a": [{"role": "user", "content": "b"}]}, None),
        ({}, None),
        ([], None),
    ],
)
def test_similar_records(record, name):
    assert format_of(record) == name


@pytest.mark.parametrize("named", sorted(FORMATS))
@pytest.mark.parametrize("own", ["table", "openai-responses", "pairs", "verl"])
def test_an_error_names_the_likeliest_format(tmp_path, named, own):
    """Records that are imported with another --format are read, left out, or refused with the name of their format."""
    (tmp_path / "a.jsonl").write_text(json.dumps(EXAMPLES[own]))
    try:
        main.main(
            ["import", "--format", named, "--input", str(tmp_path / "a.jsonl"), "--output_dir", str(tmp_path / "out")]
        )
    except ValueError as error:
        found = str(error)
        assert f"Use --format {own}, or omit --format" in found or "none of its records" in found or named == own
    else:
        assert named in (own, "table", "scored-lists", "langfuse") or (named, own) == ("comparisons", "pairs")


def test_records_of_two_formats(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(EXAMPLES[name]) for name in ("pairs", "sharegpt")))
    with pytest.raises(ValueError, match=r"a\.jsonl looks like pairs and sharegpt.*--format"):
        recognize(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("table.xlsx", b"PK\x03\x04", "spreadsheet. Save it as CSV"),
        ("batch.jsonl", b'{"custom_id": "1", "method": "POST", "url": "/v1", "body": {}}\n', "batch.*--requests"),
    ],
)
def test_files_of_another_kind(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        recognize(tmp_path / name)


def test_a_table_of_messages_keeps_its_prompts():
    """A record with messages is a table if a column holds only the completion, not the whole conversation."""
    prompt, completion = [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}]
    assert format_of({"prompt": prompt, "completion": completion, "score": 1}) == "table"
    assert format_of({"problem": "a", "response": [*prompt, *completion], "score": 1}) == "messages"
