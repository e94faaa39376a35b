import json
from pathlib import Path

import pytest
import trl
from datasets import Dataset

from topr_trl.data.messages import tokenize_turns
from topr_trl.data.tokenization import tokenize_row

PROMPT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 2 * 3 + 1?"}]
CALL = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 2, "b": 3}}}
TURNS = [
    {"role": "assistant", "content": "I ask.", "tool_calls": [CALL]},
    {"role": "tool", "name": "multiply", "content": "6"}, {"role": "assistant", "content": "It is 7."},
    {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."},
]  # fmt: skip
PLAIN = [{"role": "assistant", "content": "6."}, {"role": "user", "content": "And 1 more?"},
         {"role": "assistant", "content": "7."}]  # fmt: skip
TEMPLATES = Path(trl.__file__).parent / "chat_templates"


def use(tokenizer, name):
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    return tokenizer


def own(tokenizer, ids, mask):
    """Return the text of each turn that the model wrote."""
    turns = [[]]
    for token, is_own, before in zip(ids, mask, [False, *mask], strict=False):
        if is_own and not before and turns[-1]:
            turns.append([])
        if is_own:
            turns[-1].append(token)
    return [tokenizer.decode(turn) for turn in turns]


CALLED = '<tool_call>\n{"name": "multiply", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


@pytest.mark.parametrize("known", [True, False])
def test_turns_of_the_assistant_are_the_models(tokenizer, known):
    """Only the assistant's turns are learned, with Qwen2.5's template and with a template that TRL does not know."""
    use(tokenizer, "qwen2_5")
    if not known:
        tokenizer.chat_template += "{# of somebody else #}"
    prompt, ids, mask = tokenize_turns(PROMPT, TURNS, tokenizer)
    assert own(tokenizer, ids, mask) == [f"I ask.\n{CALLED}<|im_end|>", "It is 7.<|im_end|>", "Yes.<|im_end|>"]
    text = tokenizer.apply_chat_template([*PROMPT, *TURNS], tokenize=False)
    assert tokenizer.decode(prompt + ids) == text.rstrip("\n")
    assert tokenizer.decode(prompt) == tokenizer.apply_chat_template(PROMPT, tokenize=False, add_generation_prompt=True)
    assert mask[-1]  # Context after the last turn is dropped.


def test_an_empty_block_of_thinking_is_context(tokenizer):
    """The template adds the block, and writes it into the generation prompt if thinking is off."""
    use(tokenizer, "qwen3")
    prompt, ids, mask = tokenize_turns(PROMPT, TURNS[:3], tokenizer)
    block = "<think>\n\n</think>\n\n"
    assert own(tokenizer, ids, mask) == [f"I ask.\n{CALLED}<|im_end|>", "It is 7.<|im_end|>"]
    assert tokenizer.decode(prompt).endswith(block)
    assert f"assistant\n{block}It is 7." in tokenizer.decode(ids)
    assert tokenize_turns(PROMPT, TURNS[2:3], tokenizer) == tokenize_turns(
        PROMPT, TURNS[2:3], tokenizer, enable_thinking=False
    )


def test_a_template_that_removes_earlier_thinking_is_refused(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content if loop.last or m.role == 'user' else "
        "m.content.split('</think>')[-1] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(ValueError, match=r"changes earlier turns .* chat_template_path"):
        tokenize_turns(PROMPT, [{"role": "assistant", "content": "So.</think>6."}, *PLAIN[1:]], tokenizer)
    tokenize_turns(PROMPT, PLAIN, tokenizer)


def test_a_template_that_removes_earlier_thinking_and_says_what_is_the_models(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content if loop.last "
        "else m.content.split('</think>')[-1] }}{{ eos_token }}{% if loop.last %} {% endif %}{% endgeneration %}"
        "{% else %}{{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    turns = [PLAIN[0], PLAIN[1], {"role": "assistant", "content": "So.</think>7."}]
    prompt, ids, mask = tokenize_turns(PROMPT, turns, tokenizer)
    assert own(tokenizer, ids, mask) == ["6.<|end|>", "So.</think>7.<|end|>"]
    assert tokenizer.decode(prompt).endswith("+ 1?\nassistant: ")
    turns[0] = {"role": "assistant", "content": "So.</think>6."}
    with pytest.raises(ValueError, match=r"leaves out the content .*'So.</think>6.'.* chat_template_path"):
        tokenize_turns(PROMPT, turns, tokenizer)


def test_calls_of_tools_that_a_template_would_leave_out_are_refused(tokenizer):
    use(tokenizer, "llama3").add_special_tokens({"eos_token": "<|eot_id|>"})
    with pytest.raises(ValueError, match="tool calls and tool results"):
        tokenize_turns(PROMPT, TURNS, tokenizer)
    _, ids, mask = tokenize_turns(PROMPT, PLAIN, tokenizer, bos_token="")
    assert own(tokenizer, ids, mask) == ["6.<|eot_id|>", "7.<|eot_id|>"]


def test_messages_that_a_template_refuses(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="cannot write these messages: roles must alternate"):
        tokenize_turns(PROMPT, PLAIN, tokenizer)


def test_a_completion_may_begin_with_context(tokenizer):
    """The prompt ends with a tool call of the model, so the completion starts with the result of the call."""
    use(tokenizer, "qwen2_5")
    for _ in range(2):
        prompt, ids, mask = tokenize_turns([*PROMPT, TURNS[0]], TURNS[1:3], tokenizer)
        assert own(tokenizer, ids, mask) == ["It is 7.<|im_end|>"]
        assert CALLED in tokenizer.decode(prompt)
        assert "<tool_response>\n6" in tokenizer.decode(ids)
        tokenizer.chat_template += "{# of somebody else #}"


def test_tools_and_options_reach_the_template(tokenizer):
    use(tokenizer, "qwen2_5")
    tools = [{"type": "function", "function": {"name": "multiply", "description": "x", "parameters": {}}}]
    row = {"prompt": PROMPT, "completion": TURNS, "tools": tools, "chat_template_kwargs": {"unused": 1}}
    assert '"multiply"' in tokenizer.decode(tokenize_row(row, tokenizer).prompt_ids)


def test_calls_of_several_tools_from_a_table(tokenizer):
    """Tokenization ignores nulls that a table adds: arguments of other tools, and calls of messages without calls."""
    use(tokenizer, "qwen2_5")
    other = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "pen"}}}
    turns = [TURNS[0], TURNS[1], {"role": "assistant", "content": "", "tool_calls": [other]}, TURNS[1], TURNS[4]]
    (row,) = Dataset.from_list([{"prompt": PROMPT, "completion": turns}])
    assert "word" in row["completion"][0]["tool_calls"][0]["function"]["arguments"]  # a null
    from_table = tokenize_turns(row["prompt"], row["completion"], tokenizer)
    assert from_table == tokenize_turns(PROMPT, turns, tokenizer)
    assert own(tokenizer, *from_table[1:])[0] == f"I ask.\n{CALLED}<|im_end|>"


def test_arguments_as_json_keep_their_nulls(tokenizer):
    use(tokenizer, "qwen2_5")
    call = {"type": "function", "function": {"name": "multiply", "arguments": '{"a": 2, "b": null}'}}
    _, ids, mask = tokenize_turns(PROMPT, [{**TURNS[0], "tool_calls": [call]}, *TURNS[1:3]], tokenizer)
    assert '"arguments": {"a": 2, "b": null}}' in own(tokenizer, ids, mask)[0]
    single = {"prompt": PROMPT, "completion": [{"role": "assistant", "content": "", "tool_calls": [CALL]}]}
    as_text = {**CALL, "function": {**CALL["function"], "arguments": '{"a": 2, "b": 3}'}}
    logged = [{"role": "assistant", "content": None, "tool_calls": [as_text], "name": None}]
    assert tokenize_row({"prompt": PROMPT, "completion": logged}, tokenizer) == tokenize_row(single, tokenizer)


def test_a_call_without_a_function_has_json_arguments_too(tokenizer):
    use(tokenizer, "qwen2_5")
    flat = {"name": "multiply", "arguments": '{"a": 2, "b": 3}'}
    assert tokenize_turns(PROMPT, [{**TURNS[0], "tool_calls": [flat]}], tokenizer) == tokenize_turns(
        PROMPT, TURNS[:1], tokenizer
    )


def test_tools_as_json_keep_their_nulls(tokenizer):
    tools = [{"type": "function", "function": {"name": "multiply", "parameters": {"default": None}}}]
    found = [tokenize_turns(PROMPT, PLAIN, use(tokenizer, "qwen2_5"), each)[0] for each in (tools, json.dumps(tools))]
    assert ["null" in tokenizer.decode(prompt) for prompt in found] == [False, True]


def test_a_template_for_tools(tokenizer):
    """Hermes and Command R have a template named `tool_use` for rows with tools."""
    template = use(tokenizer, "qwen2_5").chat_template
    plain = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    tokenizer.chat_template = {"default": plain, "tool_use": template}
    tools = [{"type": "function", "function": {"name": "multiply", "parameters": {}}}]
    _, ids, mask = tokenize_turns(PROMPT, TURNS[:3], tokenizer, tools)
    assert own(tokenizer, ids, mask) == [f"I ask.\n{CALLED}<|im_end|>", "It is 7.<|im_end|>"]
    assert "multiply" in tokenizer.decode(
        tokenize_row({"prompt": PROMPT, "completion": "7", "tools": tools}, tokenizer).prompt_ids
    )
    assert "<|user|>" in tokenizer.decode(tokenize_turns(PROMPT, PLAIN[:1], tokenizer)[0])


def test_another_template_of_the_same_tokenizer(tokenizer):
    before = tokenize_turns(PROMPT, PLAIN, tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace(": ", " says: ")
    assert tokenize_turns(PROMPT, PLAIN, tokenizer) != before


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": "6."}, "a message has no role; it has content"),
        ({"role": "assistant", "content": 6}, "the content of a message is 6, and must be text or a list of parts"),
        ({"role": "assistant", "content": ["6."]}, r"the content of a message is \['6.'\], and must be text"),
        ({"role": "assistant", "tool_calls": "run"}, "its tool_calls are run, and must be a list of objects"),
        ({"role": "assistant", "tool_calls": [{"function": "run"}]}, "must be a list of objects with a function"),
    ],
)
def test_malformed_messages_are_named(tokenizer, message, expected):
    with pytest.raises(ValueError, match=expected):
        tokenize_turns(PROMPT, [message], use(tokenizer, "qwen2_5"))


def test_tools_that_are_no_json_are_named(tokenizer):
    with pytest.raises(ValueError, match=r"its tools are not valid JSON \(.*\): 'multiply'"):
        tokenize_turns(PROMPT, PLAIN, use(tokenizer, "qwen2_5"), "multiply")
    with pytest.raises(ValueError, match="its tools are not valid JSON"):  # nested too deeply
        tokenize_turns(PROMPT, PLAIN, use(tokenizer, "qwen2_5"), "[" * 100_000)
    with pytest.raises(ValueError, match="its tools are True, and must be a list"):
        tokenize_turns(PROMPT, PLAIN, tokenizer, "true")
    assert tokenize_turns(PROMPT, PLAIN, tokenizer, "") == tokenize_turns(PROMPT, PLAIN, tokenizer)


MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}"
    "{{ behind if add_generation_prompt or not loop.last else last or behind }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

UNMARKED = MARKED.replace("<|{{ m.role }}|>", "{{ m.role }}: ").replace("<|assistant|>", "assistant: ")


@pytest.fixture
def marked(tokenizer):
    """Return a tokenizer whose template writes nothing after a turn, like GLM's, unless `behind` is given.

    `last` takes its place at the end of the conversation.
    """
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|user|>", "<|assistant|>", "<|tool|>", "<|stop|>"]})
    tokenizer.chat_template = MARKED
    return tokenizer


def test_without_a_stop_token_in_the_template_the_next_roles_marker_is_one(marked):
    _, ids, mask = tokenize_turns(PROMPT, PLAIN, marked)
    assert own(marked, ids, mask) == ["6.<|user|>", "7.<|user|>"]
    _, ids, mask = tokenize_turns(PROMPT, TURNS, marked)
    assert [turn[turn.rindex("<") :] for turn in own(marked, ids, mask)] == ["<|tool|>", "<|user|>", "<|user|>"]


@pytest.mark.parametrize("name", [7, None])
def test_a_call_of_something_without_a_name(marked, name):
    turn = {**TURNS[0], "tool_calls": [{"function": {"name": name, "arguments": {}}}]}
    assert '"arguments": {}}}<|tool|>' in marked.decode(tokenize_turns(PROMPT, [turn], marked)[1])


def test_the_last_turn_gets_the_tokenizers_stop_token_if_the_template_writes_none(marked):
    marked.chat_template = UNMARKED
    row = {"prompt": PROMPT, "completion": PLAIN[:1], "chat_template_kwargs": {"behind": "\n"}}
    assert marked.decode(tokenize_row(row, marked).completion_ids) == "6.<|end|>"
    assert marked.decode(tokenize_row({**row, "finish_reason": "length"}, marked).completion_ids) == "6."
    row["completion"] = [{"role": "assistant", "content": "6. \n"}]  # The model wrote this whitespace.
    assert marked.decode(tokenize_row(row, marked).completion_ids) == "6. \n<|end|>"
    marked.eos_token = None
    with pytest.raises(ValueError, match=r"needs a stop token, and the tokenizer has none\. Set tokenizer\.eos_token"):
        tokenize_row(row, marked)
    tokenize_row({**row, "finish_reason": "length"}, marked)


def test_an_earlier_turn_without_any_stop_token_is_refused(marked):
    marked.chat_template = UNMARKED
    with pytest.raises(ValueError, match=r"no stop token after an assistant turn .* chat_template_path"):
        tokenize_turns(PROMPT, PLAIN, marked)


def test_a_stop_token_behind_a_generation_block_is_the_models(marked):
    marked.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{{ '' if loop.last else ' ' }}"
        "{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|stop|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    _, ids, mask = tokenize_turns(PROMPT, PLAIN, marked)
    assert own(marked, ids, mask) == ["6.<|stop|>", "7.<|stop|>"]


@pytest.mark.parametrize("behind", ["<|stop|>", "<|stop|>\n"])
@pytest.mark.parametrize("end", ["", "<|end|>"])
def test_a_stop_token_that_the_content_has_is_not_learned_twice(marked, behind, end):
    """Text after the first stop token is context, such as the end of a conversation in the templates of Phi."""
    given = {"behind": behind, "last": behind + end}
    turns = [{**message, "content": f"{message['content']}<|stop|>"} for message in PLAIN]
    for completion in (PLAIN, turns):
        _, ids, mask = tokenize_turns(PROMPT, completion, marked, **given)
        assert own(marked, ids, mask) == ["6.<|stop|>", "7.<|stop|>"]
    assert marked.decode(ids).startswith(f"6.<|stop|>{behind}<|user|>")  # the second one is context
    marked.eos_token = "<|stop|>"
    assert tokenize_turns(PROMPT, turns, marked, **given)[1:] == (ids, mask)


def test_the_last_turn_may_have_a_stop_token_of_its_own(marked):
    """Olmo 3's template ends earlier turns with another token, as GPT-OSS's template does."""
    _, ids, mask = tokenize_turns(PROMPT, PLAIN, marked, behind="<|stop|>\n", last="<|end|>")
    assert own(marked, ids, mask) == ["6.<|stop|>", "7.<|end|>"]


@pytest.mark.parametrize("behind", ["<|stop|><|user|>", "<|stop|>\n<|user|>"])
def test_special_tokens_that_end_a_call_are_no_stop_tokens(marked, behind):
    _, ids, mask = tokenize_turns(PROMPT, TURNS[:3], marked, behind=behind)
    assert own(marked, ids, mask)[0].endswith(f"}}{behind}")


def test_the_tokenizers_stop_token_ends_a_turn_whatever_follows(marked):
    _, ids, mask = tokenize_turns(PROMPT, PLAIN, marked, behind="<|end|><|stop|>")
    assert own(marked, ids, mask) == ["6.<|end|>", "7.<|end|>"]


THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n"
    "</think>\n\n{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}<|stop|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    ("said", "written"),
    [
        ({"content": None, "reasoning_content": "Let me count the le"}, "<think>\nLet me count the le"),
        ({"content": "It has fo", "reasoning_content": "4 ."}, "<think>\n4 .\n</think>\n\nIt has fo"),
        ({"content": "It has \n"}, "It has \n"),
    ],
)
def test_nothing_is_learned_behind_a_cut(marked, said, written):
    marked.chat_template = THINKING
    row = {"prompt": PROMPT, "completion": [{"role": "assistant", **said}], "finish_reason": "length"}
    assert marked.decode(tokenize_row(row, marked).completion_ids) == written
    stopped = marked.decode(tokenize_row({**row, "finish_reason": "stop"}, marked).completion_ids)
    assert stopped.startswith(written)
    assert stopped.endswith("<|stop|>")


def test_a_call_at_a_cut_loses_the_stop_token_alone(marked):
    marked.chat_template = THINKING
    _, whole, _ = tokenize_turns(PROMPT, TURNS[:1], marked)
    assert tokenize_turns(PROMPT, TURNS[:1], marked, truncated=True)[1] == whole[:-1]
    marked.chat_template = MARKED  # This template writes no stop token.
    _, whole, _ = tokenize_turns(PROMPT, TURNS[:1], marked)
    assert tokenize_turns(PROMPT, TURNS[:1], marked, truncated=True)[1] == whole[:-1]


def test_the_end_of_thinking_is_no_stop_token(marked):
    marked.add_special_tokens({"extra_special_tokens": ["</think>", "<|stop|>"]})
    marked.chat_template = THINKING
    turn = {"role": "assistant", "content": "", "reasoning_content": "So."}
    _, ids, _ = tokenize_turns(PROMPT, [turn], marked)
    assert marked.decode(ids) == "<think>\nSo.\n</think>\n\n<|stop|>"


def test_an_empty_turn_that_was_cut_off_is_refused(marked):
    marked.chat_template = THINKING
    row = {"prompt": PROMPT, "completion": [{"role": "assistant", "content": ""}], "finish_reason": "length"}
    with pytest.raises(ValueError, match=r"nothing to learn .*finish_reason is length"):
        tokenize_row(row, marked)
    row["completion"] = [*PLAIN[:2], *row["completion"]]
    assert marked.decode(tokenize_row(row, marked).completion_ids) == "6.<|stop|>"
