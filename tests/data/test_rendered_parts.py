"""A row is refused if the chat template leaves out a tool or a part of a message."""

import pytest

from tests.data.test_messages import CALL, PROMPT, TURNS, own, use
from tests.data.test_rendering import ANSWER, CALLS, RESULT, USER, tokenizer_of
from topr_trl.data.chat_templates import CannotWrite, missing_of_tools
from topr_trl.data.messages import tokenize_turns
from topr_trl.data.rendered_parts import check_context
from topr_trl.data.tokenization import tokenize_row

TOOLS = [{"type": "function", "function": {"name": "multiply", "description": "Multiply.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}]  # fmt: skip
WRITES_ALL = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.thinking or '' }}<|end|>{% endfor %}"


def read(tokenizer, prompt, completion=(ANSWER,), **options):
    return tokenizer.decode(tokenize_turns(prompt, list(completion), tokenizer, **options)[0])


@pytest.mark.parametrize("role", ["system", "user", "function", "developer", "critic"])
@pytest.mark.parametrize("place", ["prompt", "completion"])
def test_a_message_of_a_role_that_a_template_does_not_know_is_refused(tokenizer, role, place):
    tokenizer.chat_template = WRITES_ALL + "{% if add_generation_prompt %}[assistant]{% endif %}"
    message = {"role": role, "content": "Cats have 4."}
    prompt, completion = ([USER, message], [ANSWER]) if place == "prompt" else ([USER], [ANSWER, message, ANSWER])
    prompt_ids, ids, _ = tokenize_turns(prompt, completion, tokenizer)
    assert "Cats have 4." in tokenizer.decode(prompt_ids + ids)
    dropping = f"{{% for m in messages if m.role != '{role}' or m.content != 'Cats have 4.' %}}"
    tokenizer.chat_template = tokenizer.chat_template.replace("{% for m in messages %}", dropping)
    with pytest.raises(ValueError, match=f"leaves out the content of a message with the role {role} .*'Cats have 4.'"):
        tokenize_turns(prompt, completion, tokenizer)


@pytest.mark.parametrize("name", ["llama3", "phi3", "gemma", "deepseekv3"])
def test_tools_that_a_template_does_not_write_are_refused(name):
    with pytest.raises(ValueError, match="leaves out the tool multiply"):
        tokenize_turns([USER], [ANSWER], tokenizer_of(name), TOOLS)
    row = {"prompt": [USER], "completion": "It has 4 legs."}
    tokenize_row(row, tokenizer_of(name))
    with pytest.raises(ValueError, match="leaves out the tool multiply"):
        tokenize_row({**row, "tools": TOOLS}, tokenizer_of(name))


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "gptoss", "glm4moe", "gemma4_v5"])
def test_tools_that_a_template_writes(name):
    assert "multiply" in read(tokenizer_of(name), [USER], tools=TOOLS)


def test_words_of_messages_are_no_definitions_of_tools(tokenizer):
    use(tokenizer, "llama3").add_special_tokens({"eos_token": "<|eot_id|>"})
    with pytest.raises(ValueError, match="leaves out the tool multiply"):
        tokenize_turns([{**USER, "content": "Do not multiply a with b."}], [ANSWER], tokenizer, TOOLS)


def test_a_parameter_that_is_left_out():
    assert missing_of_tools(TOOLS, "multiply(a)") == "the parameter b of the tool multiply"
    assert missing_of_tools(TOOLS, "multiply(a, b)") is None
    odd = [{"name": "run"}, None, {"function": None}, {"name": "x", "parameters": []}, {"function": {"name": [None]}}]
    assert missing_of_tools(odd, "run x [None]") is None


def test_thinking_is_needed_until_the_user_speaks_again():
    """Templates may remove thinking only before the last user message, as Qwen3's template does."""
    thought = {**CALLS, "reasoning_content": "I multiply."}
    loop = [USER, thought, RESULT]
    assert "I multiply." in read(tokenizer_of("qwen3"), loop)
    with pytest.raises(ValueError, match="leaves out the reasoning_content of a message with the role assistant"):
        tokenize_turns(loop, [ANSWER], tokenizer_of("qwen2_5"))
    for name in ("qwen3", "qwen2_5", "deepseek_r1_distill"):
        earlier = [USER, {**ANSWER, "reasoning_content": "I count."}, {**USER, "content": "And two?"}]
        assert "I count." not in read(tokenizer_of(name), earlier)
    in_content = [
        USER,
        {**ANSWER, "content": "<think>\nI count.\n</think>\n\n4 legs."},
        {**USER, "content": "And two?"},
    ]
    assert "4 legs." in read(tokenizer_of("qwen3"), in_content)


def test_thinking_in_the_content_of_a_turn_that_tools_follow(tokenizer):
    calls = {**CALLS, "content": "<think>\nI multiply.\n</think>\n\nOne moment."}
    assert "I multiply." in read(tokenizer_of("qwen3"), [USER, calls, RESULT])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{{ m.tool_calls }}<|end|>{% endfor %}"
    )
    with pytest.raises(ValueError, match=r"leaves out the thinking .*'I multiply\.'"):
        tokenize_turns([USER, calls, RESULT], [ANSWER], tokenizer)


ODD = 'He said "4\\2"\nand\tthen élan \N{GRINNING FACE}'


@pytest.mark.parametrize("written", [
    "m.content", "m.content | trim", "m.content | tojson", "m.content | tojson(ensure_ascii=True)",
    "m.content | tojson | tojson", "{'result': m.content} | tojson(indent=2)", "{'result': m.content}",
])  # fmt: skip
def test_content_may_be_trimmed_or_escaped(tokenizer, written):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ " + written + " if m.role == 'tool' else m.content }}{{ m.tool_calls or '' }}<|end|>"
        "{% endfor %}"
    )  # fmt: skip
    read(tokenizer, [USER, CALLS, {**RESULT, "content": f"  {ODD}\n"}])


@pytest.mark.parametrize("arguments", [{"a": ODD}, {"a": [{"inner": ODD}], "b": None}, {"a": 2, "b": 3.5}, {}, [ODD]])
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_5_think", "glm4moe", "gptoss", "gemma4_v5", "llama3_1"])
def test_arguments_may_be_escaped(name, arguments):
    calls = {**CALLS, "tool_calls": [{**CALL, "function": {"name": "multiply", "arguments": arguments}}]}
    if isinstance(arguments, list) and name not in ("qwen2_5", "gptoss", "llama3_1"):
        pytest.skip("the template needs an object")
    read(tokenizer_of(name), [USER, calls, RESULT])
    tokenize_turns([USER], [calls, RESULT, ANSWER], tokenizer_of(name))


@pytest.mark.parametrize("in_completion", [False, True])
def test_arguments_that_are_left_out(tokenizer, in_completion):
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "({{ c.function.arguments.a }}){% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    calls = {**CALLS, "tool_calls": [{"function": {"name": "multiply", "arguments": {"a": "two", "with": "three"}}}]}
    parts = ([USER], [calls, RESULT, ANSWER]) if in_completion else ([USER, calls, RESULT], [ANSWER])
    check_context([USER], "How many legs?", tokenizer)
    with pytest.raises(CannotWrite, match="leaves out an argument of the call of multiply"):
        check_context([calls], "multiply(two)", tokenizer)
    with pytest.raises(ValueError, match=r"call of multiply|calls tools"):
        tokenize_turns(*parts, tokenizer)


@pytest.mark.parametrize("role", ["system", "user"])
@pytest.mark.parametrize("content", ["Be kind. /no_think", "/think", "/system_override Be kind."])
def test_a_template_may_remove_switches_of_thinking(tokenizer, role, content):
    check_context([{"role": role, "content": content}, USER], "Be kind.<|end|>How many legs?", tokenizer)
    with pytest.raises(CannotWrite, match=f"role {role}"):
        check_context([{"role": role, "content": f"{content} Now."}, USER], "Be kind.<|end|>How many legs?", tokenizer)


def test_messages_are_found_in_their_order(tokenizer):
    system, turns = {"role": "system", "content": "Be kind."}, [USER, ANSWER, {**USER, "content": "Sure?"}]
    text = "How many legs?<|end|>It has 4 legs.<|end|>Sure?<|end|>Be kind."
    check_context([system, *turns], text, tokenizer)  # Some templates write the system message last.
    with pytest.raises(CannotWrite, match=r"message with the role user .*'How many legs\?'"):
        check_context([*turns, USER], text, tokenizer)
    results = [USER, {**CALLS, "content": "I ask."}, RESULT]
    check_context(results, "How many legs? multiply a b 6 I ask.", tokenizer)  # in the order of Gemma 4's template
    with pytest.raises(CannotWrite, match="message with the role tool"):
        check_context([*results, RESULT], "How many legs? 6 multiply a b I ask.", tokenizer)


@pytest.mark.parametrize("content", ["end", "e", "|end|>"])
def test_letters_of_special_tokens_are_no_content(tokenizer, content):
    with pytest.raises(CannotWrite):
        check_context([{"role": "user", "content": content}], "<|end|>", tokenizer)


# Templates that open thinking in the generation prompt.


def test_thinking_goes_into_the_content_where_a_template_opens_it():
    tokenizer = tokenizer_of("deepseek_r1_distill")
    thought = {**ANSWER, "reasoning_content": "I count.\nFour."}
    prompt, ids, mask = tokenize_turns([USER], [thought], tokenizer)
    assert tokenizer.decode(prompt).endswith("<think>\n")
    assert own(tokenizer, ids, mask) == ["I count.\nFour.\n</think>\n\nIt has 4 legs.<｜end▁of▁sentence｜>"]
    written = {**ANSWER, "content": "<think>\nI count.\nFour.\n</think>\n\nIt has 4 legs."}
    assert tokenize_turns([USER], [written], tokenizer) == (prompt, ids, mask)
    cut = {**thought, "content": ""}
    _, ids, mask = tokenize_turns([USER], [cut], tokenizer, truncated=True)
    assert own(tokenizer, ids, mask) == ["I count.\nFour."]
    _, ids, _ = tokenize_turns([USER], [cut], tokenizer)
    assert tokenizer.decode(ids) == "I count.\nFour.\n</think>\n\n<｜end▁of▁sentence｜>"
    turns = [thought, {**USER, "content": "And two?"}, {**thought, "content": "8."}]
    _, ids, mask = tokenize_turns([USER], turns, tokenizer)
    assert [turn.partition("</think>")[2] for turn in own(tokenizer, ids, mask)] == [
        "\n\nIt has 4 legs.<｜end▁of▁sentence｜>", "\n\n8.<｜end▁of▁sentence｜>",
    ]  # fmt: skip


def test_thinking_stays_refused_where_a_template_does_not_open_it():
    with pytest.raises(ValueError, match="leaves out the reasoning_content of an assistant's turn"):
        tokenize_turns([USER], [{**ANSWER, "reasoning_content": "I count."}], tokenizer_of("llama3"))


# Turns with weight 0.


@pytest.mark.parametrize("known", [True, False])
def test_turns_with_weight_0_are_context(tokenizer, known):
    use(tokenizer, "qwen2_5")
    if not known:
        tokenizer.chat_template += "{# of somebody else #}"
    given = [{**TURNS[0], "weight": 0}, TURNS[1], {**TURNS[2], "weight": 1}, *TURNS[3:]]
    prompt, ids, mask = tokenize_turns(PROMPT, given, tokenizer)
    assert own(tokenizer, ids, mask) == ["It is 7.<|im_end|>", "Yes.<|im_end|>"]
    known_prompt, all_ids, _ = tokenize_turns(PROMPT, TURNS, tokenizer)
    assert prompt + ids == known_prompt + all_ids
    last = [{**message, "weight": 0} if message["role"] == "assistant" else message for message in TURNS[:3]]
    with pytest.raises(ValueError, match=r"nothing to learn .* weight 0"):
        tokenize_turns(PROMPT, last, tokenizer)
    _, ids, mask = tokenize_turns(PROMPT, [*last, USER, ANSWER, USER, last[2]], tokenizer)
    assert own(tokenizer, ids, mask) == ["It has 4 legs.<|im_end|>"]


def test_turns_with_weight_0_by_blocks_of_a_template():
    """Qwen3's own template changes earlier turns, so the blocks of TRL's template are used."""
    tokenizer = tokenizer_of("qwen3")
    turns = [{**ANSWER, "reasoning_content": "I count."}, USER, {**ANSWER, "content": "Still 4."}]
    assert len(own(tokenizer, *tokenize_turns([USER], turns, tokenizer)[1:])) == 2
    turns[0]["weight"] = 0
    _, ids, mask = tokenize_turns([USER], turns, tokenizer)
    assert own(tokenizer, ids, mask) == ["Still 4.<|im_end|>"]
    assert "It has 4 legs." in tokenizer.decode(ids)


# Parts of messages, and arguments of the template.


@pytest.mark.parametrize(
    ("part", "why"),
    [({"type": "text", "value": "4?"}, "no text: it has value"),
     ({"type": "text", "text": {"value": "4?"}}, r"no text: its text is \{'value'"),
     ({"type": "input_text", "content": "4?"}, "no text: it has content")],
)  # fmt: skip
def test_a_part_whose_text_has_another_key_is_refused(tokenizer, part, why):
    for given in ({"prompt": [{"role": "user", "content": [part]}], "completion": [ANSWER]},
                  {"prompt": [USER], "completion": [{"role": "assistant", "content": [part]}]}):  # fmt: skip
        with pytest.raises(ValueError, match=why):
            tokenize_row(given, use(tokenizer, "qwen2_5"))


def test_a_part_may_be_empty(tokenizer):
    parts = [{"type": "text", "text": None}, {"type": "text", "text": "4?", "cache_control": {"type": "ephemeral"}}]
    assert "4?" in read(use(tokenizer, "qwen2_5"), [{"role": "user", "content": parts}])


@pytest.mark.parametrize("options", [{"enable_thinking": False}, '{"enable_thinking": false}'])
def test_options_of_a_row_reach_its_prompt_and_its_completion(options):
    tokenizer = tokenizer_of("qwen3")
    row = {"prompt": [USER], "completion": [ANSWER], "chat_template_kwargs": options}
    made = tokenize_row(row, tokenizer)
    assert tokenizer.decode(made.prompt_ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert tokenizer.decode(made.completion_ids) == "It has 4 legs.<|im_end|>"
    as_text = tokenize_row({**row, "completion": "It has 4 legs."}, tokenizer)
    assert as_text.prompt_ids == made.prompt_ids


def test_a_null_option_is_of_other_rows():
    row = {"prompt": [USER], "completion": [ANSWER]}
    tokenizer = tokenizer_of("qwen3")
    tokenizer.chat_template = tokenizer.chat_template.replace("enable_thinking is false", "not enable_thinking")
    expected = tokenize_row(row, tokenizer)
    assert tokenize_row({**row, "chat_template_kwargs": {"enable_thinking": None}}, tokenizer) == expected


@pytest.mark.parametrize(
    ("options", "why"),
    [("{", "not valid JSON"), pytest.param("[" * 100_000, "not valid JSON", id="deep"), ("[1]", "must be an object"),
     ([1], "must be an object"),
     ({"tools": []}, "have tools, which the trainer sets"), ('{"chat_template": "x"}', "have chat_template")],
)  # fmt: skip
def test_options_that_cannot_be_used_are_refused(tokenizer, options, why):
    with pytest.raises(ValueError, match=f"chat_template_kwargs.* {why}"):
        tokenize_row({"prompt": [USER], "completion": [ANSWER], "chat_template_kwargs": options}, tokenizer)


@pytest.mark.parametrize("weight", [0.5, 2, "0"])
def test_other_weights_are_refused(tokenizer, weight):
    with pytest.raises(ValueError, match=r"weight .*: it must be 1 .* or 0"):
        tokenize_turns(PROMPT, [{**ANSWER, "weight": weight}], tokenizer)
