"""A model that thinks: what is learned is the text that the model wrote, and no tags that a template adds."""

import pytest

from tests.data.test_messages import own
from tests.data.test_rendering import ANSWER, CALLS, TEMPLATES, USER, tokenizer_of
from topr_trl.data.chat_templates import DEFAULT, Tags, tags_in, with_thinking_in_content, without_repeated_thinking
from topr_trl.data.messages import tokenize_turns
from topr_trl.data.tokenization import tokenize_row

RAW = "I count.\n</think>\n\nIt has 4 legs."
OPENED = ["deepseek_r1_distill", "deepseekv3", "nemotron_3_nano", "qwen3_5_think", "qwen3_6", "qwen3_8"]
KNOWN = {path.stem for path in TEMPLATES.glob("*.jinja")}


def learned(tokenizer, content, reason="stop", **message):
    row = {"prompt": [USER], "completion": [{**ANSWER, "content": content, **message}], "finish_reason": reason}
    found = tokenize_row(row, tokenizer)
    return tokenizer.decode(found.prompt_ids), tokenizer.decode(found.completion_ids)


@pytest.fixture(params=OPENED)
def opening(request):
    """Return a tokenizer whose template opens thinking in the generation prompt."""
    if request.param not in KNOWN:
        pytest.skip("this release of TRL lacks the template")
    return tokenizer_of(request.param)


@pytest.mark.parametrize("repeats", ["", "<think>\n"])
def test_raw_content_is_the_whole_completion(opening, repeats):
    """A server without a reasoning parser logs thinking, closing tag and answer as content."""
    prompt, whole = learned(opening, repeats + RAW)
    assert prompt.endswith("<think>\n")
    assert whole.startswith(RAW)
    assert whole.count("</think>") == 1
    assert learned(opening, repeats + RAW, reasoning_content="I count.") == (prompt, whole)
    assert learned(opening, repeats + RAW, "length") == (prompt, RAW)


def test_raw_content_that_was_cut_in_thinking(opening):
    prompt, cut = learned(opening, "<think>\nI count", "length")
    assert (prompt[-8:], cut) == ("<think>\n", "I count")
    with pytest.raises(ValueError, match=r"cut off .* no </think>.* reasoning_content.*enable_thinking"):
        learned(opening, "I count", "length")
    assert learned(opening, "", "length", reasoning_content="I count") == (prompt, "I count")


@pytest.mark.parametrize("name", ["qwen3", "glm4moe"])
@pytest.mark.parametrize("content", ["<think>I count", f"<think>{RAW}", "<think>\n\n</think>\n\n4."])
def test_raw_content_that_opens_thinking(name, content):
    prompt, written = learned(tokenizer_of(name), content, "length")
    assert prompt.endswith(("assistant\n", "<|assistant|>"))
    assert written == content


def test_raw_content_before_a_call():
    _, written = learned(tokenizer_of("qwen3_5_think"), "I count.\n</think>\n\n", tool_calls=CALLS["tool_calls"])
    assert written.startswith("I count.\n</think>\n\n<tool_call>\n<function=multiply>")


def test_a_raw_turn_that_a_template_changes_later_is_refused():
    tokenizer, raw = tokenizer_of("qwen3_5_think"), {**ANSWER, "content": RAW}
    stop = "<|im_end|>"
    assert own(tokenizer, *tokenize_turns([USER], [raw, USER, raw], tokenizer)[1:]) == [RAW + stop, RAW + stop]
    tokenizer = tokenizer_of("deepseek_r1_distill")
    prompt, ids, mask = tokenize_turns([USER], [raw, USER, raw], tokenizer)
    assert [turn.partition("<｜")[0] for turn in own(tokenizer, ids, mask)] == [RAW, RAW]
    assert tokenizer.decode(prompt).endswith("<think>\n")
    if "qwen3_8" in KNOWN:
        with pytest.raises(ValueError, match=r"writes thinking \(</think>\) .* reasoning_content"):
            tokenize_turns([USER], [raw, USER, ANSWER], tokenizer_of("qwen3_8"))


def test_an_answer_without_thinking_comes_after_a_closed_block():
    tokenizer = tokenizer_of("qwen3_5_think")
    for content in ("It has 4 legs.", "\n\nIt has 4 legs."):  # A parser can leave the white space after thinking.
        prompt, written = learned(tokenizer, content)
        assert (prompt + written).count("</think>") == 1
        assert written == f"{content.lstrip()}<|im_end|>" or written == f"{content}<|im_end|>"


BLOCKS = (
    "{{% for m in messages %}}<|{{{{ m.role }}}}|>{{% if m.role == 'assistant' %}}{}{{{{ m.thinking or '' }}}}{}"
    "{{% endif %}}{{{{ m.content }}}}<|end|>{{% endfor %}}{{% if add_generation_prompt %}}<|assistant|>{}{{% endif %}}"
)


@pytest.mark.parametrize(
    ("opening", "closing"),
    [("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"), ("<thought>\n", "\n</thought>\n"),
     (" <|channel>thought\n", "<channel|>"), (" <|channel|>analysis ", " <|end|><|channel|>final ")],
)  # fmt: skip
@pytest.mark.parametrize("in_prompt", [True, False])
def test_tags_of_any_template(tokenizer, opening, closing, in_prompt):
    tokenizer.chat_template = BLOCKS.format(opening, closing, opening if in_prompt else "")
    raw = f"I count.{closing}4."
    assert learned(tokenizer, opening + raw)[1] == f"{raw if in_prompt else opening + raw}<|end|>"
    assert learned(tokenizer, opening + "I count", "length")[1] == ("" if in_prompt else opening) + "I count"
    assert learned(tokenizer, "4.")[1] == "4.<|end|>"
    if in_prompt:
        assert learned(tokenizer, raw)[1] == f"{raw}<|end|>"
        assert learned(tokenizer, raw, thinking="I count.")[1] == f"{raw}<|end|>"
    else:
        with pytest.raises(ValueError, match="raw completion"):
            learned(tokenizer, raw)


def test_special_tokens_that_template_and_content_have_are_refused(tokenizer):
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|message|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ ' to=user<|message|>' if m.role == 'assistant' else '' }}"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert learned(tokenizer, "4.")[1] == " to=user<|message|>4.<|end|>"
    with pytest.raises(ValueError, match=r"writes <\|message\|>, which the content has, too"):
        learned(tokenizer, " to=user<|message|>4.")


def test_tags_are_found_in_renderings():
    thought, plain = "USER ?\nBOT <a>[thinking-placeholder]</a>[answer-placeholder]", "USER ?\nBOT [answer-placeholder]"
    assert tags_in(thought, plain, "USER ?\nBOT ") == Tags("<a>", "</a>")
    assert tags_in(plain, plain, "USER ?\nBOT ") is None
    assert tags_in(plain, plain, "USER ?\nBOT <think>\n") == DEFAULT
    together = "USER ?\nBOT [thinking-placeholder][answer-placeholder]"
    assert tags_in(together, plain, "USER ?\nBOT ") is None


def test_thinking_that_is_in_the_content_is_not_added_again():
    message = {**ANSWER, "content": "<think>So.</think>4.", "reasoning_content": "So."}
    assert with_thinking_in_content(message, is_cut=False) is message
    assert with_thinking_in_content(ANSWER, is_cut=True) is ANSWER
    assert without_repeated_thinking(message, DEFAULT) == {**ANSWER, "content": message["content"]}
    other = {**message, "reasoning_content": "Four."}
    assert without_repeated_thinking(other, DEFAULT) is other
