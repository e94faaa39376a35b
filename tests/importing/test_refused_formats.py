"""Test that files which the import does not read are refused by name, and that its advice works."""

import json

import pytest
from records import EXAMPLES

from topr_trl.importing.recognition import recognize
from topr_trl.importing.refused_formats import REFUSED, refused

USER = {"role": "user", "content": "Legs?"}
RECORDS = {
    "ChatGPT or Claude": {"mapping": {}, "current_node": "a"},
    "Ollama": {"model": "m", "created_at": "t", "response": "Fo", "done": False},
    "steps with a label": {"prompt": "Legs?", "completions": ["Four", "times two"], "labels": [True, False]},
}  # fmt: skip


def test_each_entry_has_an_example():
    assert [refused(record) for record in RECORDS.values()] == list(REFUSED)


@pytest.mark.parametrize("name", RECORDS)
def test_a_file_is_refused_with_its_name_and_advice(tmp_path, name):
    (tmp_path / "log.jsonl").write_text(json.dumps(RECORDS[name]))
    with pytest.raises(ValueError, match=rf"log\.jsonl: it looks like .*{name}.*\. .*(Write|--\w+_field|--messages)"):
        recognize(tmp_path / "log.jsonl")


@pytest.mark.parametrize("name", EXAMPLES)
def test_formats_that_are_read_are_not_refused(name):
    assert refused(EXAMPLES[name]) is None


@pytest.mark.parametrize(
    "more",
    [{"sessionId": "s", "message": "Hello"}, {"metadata": {"candidates": 3}}, {"contents": "a"}, {"simulations": 3},
     {"candidates": [{"document": "Cats have legs."}]}, {"answers": [{"text": "4", "answer_start": 3}]},
     {"answer_a": "2", "answer_b": "4"}, {"done": True}, {"payload": {"messages": []}, "timestamp": 1, "type": "chat"},
     {"chat_messages": [USER]}],
)  # fmt: skip
def test_similar_fields_are_not_refused(more):
    assert refused({"prompt": "Legs?", "response": "4", "score": 1, **more}) is None
