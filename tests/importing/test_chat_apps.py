"""Test the import of rated answers from Open WebUI and LibreChat.

Their web pages write the exports, in TypeScript. So these records follow the source code, see `FORMAT.source`.
"""

import pytest
from reading import LEGS, imported, learned, turns

from topr_trl.importing.format import NotOfFormat, Unusable
from topr_trl.importing.formats import librechat, open_webui

CAT, THREE = ("user", "Legs of a cat?", None, []), ("user", "And of three?", None, [])
OUTPUT = [
    {"type": "message", "role": "assistant", "status": "completed", "content": []},
    {"type": "reasoning", "content": [{"type": "output_text", "text": "Ask."}], "start_tag": "<think>"},
    {"type": "function_call", "call_id": "c1", "name": "legs", "arguments": LEGS["arguments"]},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "FOUR"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is 12."}]},
]
CALLED = [("assistant", "", "Ask.", [LEGS]), ("tool", "FOUR", None, []), ("assistant", "It is 12.", None, [])]


def of_webui(name, parent, role, content, **more):
    return {"id": name, "parentId": parent, "childrenIds": [], "role": role, "content": content, **more}


def chat(**answer):
    """Return a chat with two answers to its second question. `answer` has fields of the first of them, `a2`."""
    rating = {"rating": -1, "reason": "", "details": {"rating": 3}}
    nodes = [
        of_webui("u1", None, "user", "Legs of a cat?"), of_webui("a1", "u1", "assistant", "Four."),
        of_webui("u2", "a1", "user", "And of three?"),
        {**of_webui("a2", "u2", "assistant", "7", model="m", done=True, annotation=rating), **answer},
        of_webui("a3", "u2", "assistant", "12", model="m", done=True, annotation={"rating": 1, "details": None}),
        of_webui("u3", "a3", "user", "Thanks!"), of_webui("a4", "u3", "assistant", "UNRATED"),
    ]  # fmt: skip
    inner = {"history": {"messages": {each["id"]: each for each in nodes}, "currentId": "a4"}, "models": ["m"],
             "params": {"system": "Calculate.", "temperature": 0.7}, "messages": nodes[:2]}  # fmt: skip
    return {"id": "c", "title": "Cats", "chat": inner}


def feedback(name="a2", **answer):
    given = chat(**answer)
    data = given["chat"]["history"]["messages"][name]["annotation"]
    return {"id": "f", "type": "rating", "data": {**data, "model_id": "m"}, "snapshot": {"chat": given},
            "meta": {"message_id": name, "message_index": 4, "chat_id": "c"}}  # fmt: skip


@pytest.mark.parametrize("export", ["feedback", "chats"])
def test_only_the_rated_answer_of_open_webui_is_learned(tmp_path, tokenizer, export):
    given = [feedback(), feedback("a3")] if export == "feedback" else [chat()]
    rows = imported(tmp_path, given)
    asked = [("system", "Calculate.", None, []), CAT, ("assistant", "Four.", None, []), THREE]
    assert [turns(row["prompt"]) for row in rows] == [asked] * 2
    assert (rows["reward"][:], rows["model"][:], rows["temperature"][:]) == ([-1.0, 1.0], ["m"] * 2, [0.7] * 2)
    assert [learned(row, tokenizer) for row in rows] == [[f"{answer}{tokenizer.eos_token}"] for answer in ("7", "12")]
    rows = imported(tmp_path, given, "--reward_fields", "data.details.rating", "--skip_unrewarded")
    assert rows["reward"][:] == [3.0]


def test_thinking_and_tools_of_open_webui():
    (row,) = open_webui.rows(feedback(content="", output=OUTPUT, sources=[{"document": ["FOUR"]}]))
    assert turns(row["completion"]) == CALLED
    shown = '<details type="reasoning" done="true" duration="1">\n<summary>Thought for 1 seconds</summary>\n'
    (row,) = open_webui.rows(feedback(content=f"{shown}> 3 &lt; 4\n> So.\n</details>\n12", done=False))
    assert turns(row["completion"]) == [("assistant", "12", "3 < 4\nSo.", [])]
    assert row["finish_reason"] == "length"
    assert open_webui.rows(feedback(error={"content": "timeout"})) == ["failed"]
    assert open_webui.rows(next(open_webui.ratings({"chat": {"history": {"messages": {}}}}))) == ["ungraded"]


@pytest.mark.parametrize(
    ("answer", "error", "why"),
    [
        ({"originalContent": "8"}, Unusable, "edited the rated answer"),
        ({"files": [{"type": "image"}]}, Unusable, "files, sources or a summary, and the export lacks"),
        ({"sources": [{"document": ["CONTEXT"]}]}, Unusable, "files, sources or a summary, and the export lacks"),
        ({"contextSummary": "SUMMARY"}, Unusable, "files, sources or a summary, and the export lacks"),
        ({"content": '<details type="tool_calls" done="true">\n</details>\n12'}, Unusable, "shows tool_calls as HTML"),
        ({"output": [{**OUTPUT[-1], "start_tag": "<solution>"}]}, Unusable, "tag around the model's text"),
        ({"role": "user"}, NotOfFormat, "from user, not the assistant"),
        ({"parentId": "gone"}, NotOfFormat, "message gone is not in the chat"),
        ({"parentId": "a2"}, NotOfFormat, "message a2 is not in the chat, or is its own parentId"),
    ],
)
def test_text_that_open_webui_does_not_export(answer, error, why):
    with pytest.raises(error, match=why):
        open_webui.rows(feedback(**answer))


def test_feedback_without_a_chat():
    with pytest.raises(Unusable, match=r"no snapshot.*Export it in Admin Panel"):
        open_webui.rows({**feedback(), "snapshot": None})


def of_librechat(name, parent, text, **more):
    return {"messageId": name, "parentMessageId": parent, "text": text, "isCreatedByUser": name[0] == "u", **more}


PARTS = [
    {"type": "think", "think": "Ask."},
    {"type": "tool_call", "tool_call": {"id": "c1", "name": "legs", "args": LEGS["arguments"], "output": "FOUR"}},
    {"type": "text", "text": {"value": "It is 12."}},
]
ROOT = "00000000-0000-0000-0000-000000000000"


def conversation(**answer):
    return {
        "conversationId": "c", "endpoint": "openAI", "options": {"promptPrefix": "Calculate.", "temperature": 0.7},
        "messages": [
            of_librechat("u1", ROOT, "Legs of a cat?"), of_librechat("a1", "u1", "Four."),
            of_librechat("u2", "a1", "And of three?"),
            of_librechat("a2", "u2", "", content=PARTS, feedback={"rating": "thumbsUp"}, model="m", **answer),
            of_librechat("a3", "u2", "7", feedback={"rating": "thumbsDown", "tag": "inaccurate"}, unfinished=True),
            of_librechat("u3", "a3", "Sure?"), of_librechat("a4", "u3", "UNRATED")],
    }  # fmt: skip


def nested(messages, parent=ROOT):
    found = []
    for each in messages:
        if each["parentMessageId"] == parent:
            own = {name: value for name, value in each.items() if name != "parentMessageId"}
            found.append({**own, "children": nested(messages, each["messageId"])})
    return found


@pytest.mark.parametrize("form", ["branches", "tree"])
def test_only_answers_with_a_thumb_of_librechat_are_learned(tmp_path, tokenizer, form):
    given = conversation()
    if form == "tree":
        given["messagesTree"] = nested(given.pop("messages"))
    rows = imported(tmp_path, given)
    asked = [("system", "Calculate.", None, []), CAT, ("assistant", "Four.", None, []), THREE]
    assert [turns(row["prompt"]) for row in rows] == [asked] * 2
    assert [turns(row["completion"]) for row in rows] == [CALLED, [("assistant", "7", None, [])]]
    assert (rows["reward"][:], rows["finish_reason"][:]) == ([1.0, -1.0], [None, "length"])
    assert (rows["model"][:], rows["temperature"][:]) == (["m", None], [0.7] * 2)
    assert learned(rows[1], tokenizer) == ["7"]


def test_a_conversation_of_librechat_without_ratings_or_parents(tmp_path):
    messages = [{"messageId": name, "text": name, "isCreatedByUser": name[0] == "u"} for name in ("u1", "a1", "u2")]
    (unrated,) = librechat.ratings({"conversationId": "c", "messages": messages})
    assert librechat.rows(unrated) == ["ungraded"]
    rated = {"messageId": "a2", "text": "12", "isCreatedByUser": False, "feedback": {"rating": "thumbsUp"}}
    (record,) = librechat.ratings({"conversationId": "c", "messages": [*messages, rated]})
    (row,) = librechat.rows(record)
    assert [turn["content"] for turn in (*row["prompt"], *row["completion"])] == ["u1", "a1", "u2", "12"]


@pytest.mark.parametrize(
    ("answer", "error", "why"),
    [
        ({"files": [{"file_id": "f"}]}, Unusable, "has files, and the export lacks"),
        ({"quotes": ["Cats"]}, Unusable, "has quotes"),
        ({"isCreatedByUser": True}, NotOfFormat, "rated, and is from the user"),
        ({"content": None, "text": ":::thinking\nHm.\n:::\n12"}, Unusable, ":::thinking"),
        ({"content": [{"type": "image_file", "image_file": {}}]}, Unusable, "part of type image_file"),
    ],
)
def test_text_that_librechat_does_not_export(answer, error, why):
    given = conversation()
    given["messages"][3].update(answer)
    with pytest.raises(error, match=why):
        librechat.rows(next(librechat.ratings(given)))
    given["messages"][3]["error"] = True
    assert answer.get("isCreatedByUser") or librechat.rows(next(librechat.ratings(given))) == ["failed"]


def test_two_system_prompts_of_librechat():
    given = conversation()
    given["options"]["instructions"] = "Think."
    with pytest.raises(Unusable, match="options have promptPrefix and instructions"):
        librechat.rows(next(librechat.ratings(given)))
