"""Each learned turn is exactly the text that the model wrote."""

import re

import pytest
from tokenizers.processors import ByteLevel
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from tests.data.test_messages import CALL, PLAIN, PROMPT, TEMPLATES, own
from topr_trl.data.chat_templates import open_thinking
from topr_trl.data.messages import tokenize_turns
from topr_trl.data.text_tokens import special_tokens
from topr_trl.tasks import arithmetic

USER = {"role": "user", "content": "How many legs?"}
ANSWER = {"role": "assistant", "content": "It has 4 legs."}
CALLS = {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "call00001"}]}
RESULT = {"role": "tool", "name": "multiply", "tool_call_id": "call00001", "content": "6"}
COMPLETIONS = {
    "plain": [ANSWER],
    "reasoning": [{**ANSWER, "reasoning_content": "I count them."}],
    "reasoning in the content": [{**ANSWER, "content": "<think>\nI count them.\n</think>\n\nIt has 4 legs."}],
    "two turns": [ANSWER, USER, {**ANSWER, "content": "Still 4."}],
    "reasoning in two turns": [
        {**ANSWER, "reasoning_content": "I count them."},
        USER,
        {**ANSWER, "content": "Still 4.", "reasoning_content": "I count again."},
    ],
    "tool": [CALLS, RESULT, ANSWER],
    "text and call": [{**CALLS, "content": "I ask."}, RESULT, ANSWER],
    "two calls": [{**CALLS, "tool_calls": CALLS["tool_calls"] * 2}, RESULT, RESULT, ANSWER],
}
ALL_TEMPLATES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
# These templates write content only if it is a list of parts. Only `TOPRTrainer` trains on images.
OF_VISION = {"idefics3", "llava_next", "smolvlm"}
SPECIAL = re.compile(r"<\|[^<>|\s]+\|>|<｜[^<>\s]+?｜>|<(?:start|end)_of_\w+>|<\|[a-z_]+>|<[a-z_]+\|>|\[gMASK\]|<sop>")


def tokenizer_of(name):
    """Return the bundled tokenizer with a template from TRL, and with the special tokens of the template."""
    template = (TEMPLATES / f"{name}.jinja").read_text()
    tokenizer = AutoTokenizer.from_pretrained(arithmetic.CARELESS_MODEL)
    special = {"bos_token": "<BOS>", "eos_token": "<EOS>", "extra_special_tokens": sorted({*SPECIAL.findall(template)})}
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.chat_template = template
    return tokenizer


BLOCKS = (
    "{% for m in messages %}{{ '.' if loop.last and loop.index == 2 }}{% if m.role == 'assistant' %}"
    "{% generation %}[assistant]{{ space }}{{ m.content }}"
    "{% endgeneration %}{% else %}[{{ m.role }}]{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def squeezed(text):
    return "".join(text.split())


def check_turn(tokenizer, message, written):
    content = squeezed(message["content"].removeprefix("<think>"))  # The generation prompt can have `<think>`.
    for said in (content, squeezed(message.get("reasoning_content", ""))):
        assert said in squeezed(written)
    assert written.count("multiply") >= len(message.get("tool_calls", []))
    ids = tokenizer(written, add_special_tokens=False)["input_ids"]
    assert ids[-1] in special_tokens(tokenizer)
    assert ids[-1] != ids[-2]
    if content and not message.get("tool_calls"):
        assert not re.search(r"\s", written[written.rindex(message["content"][-5:]) + 5 :])


@pytest.mark.parametrize("name", ALL_TEMPLATES)
def test_only_text_of_the_model_is_learned(name):
    tokenizer, refused = tokenizer_of(name), {}
    for case, completion in COMPLETIONS.items():
        try:
            _, ids, mask = tokenize_turns([USER], completion, tokenizer)
        except ValueError as error:
            refused[case] = str(error)
            continue
        turns = own(tokenizer, ids, mask)
        for message, written in zip([m for m in completion if m["role"] == "assistant"], turns, strict=True):
            check_turn(tokenizer, message, written)
    assert ({"plain", "two turns"} & {*refused} != set()) == (name.removesuffix("_training") in OF_VISION)
    assert all("chat template" in why and "chat_template_path" in why for why in refused.values())


@pytest.mark.parametrize("name", ALL_TEMPLATES)
def test_a_truncated_turn_has_no_part_of_a_stop_token(name):
    """A truncated turn ends with its content, even if the content has letters of the stop token."""
    if name.removesuffix("_training") in OF_VISION:
        pytest.skip("the template writes content only where it is a list of parts")
    tokenizer = tokenizer_of(name)
    stop = tokenizer.decode(tokenize_turns([USER], [ANSWER], tokenizer)[1]).partition(ANSWER["content"])[2]
    opened = open_thinking([USER], tokenizer, {})[1]
    for content in (*sorted({*stop}), "end", stop[:-1], f"4.{stop[:2]}"):
        answer = [{**ANSWER, "content": f"{opened}So.</think>{content}" if opened else content}]
        whole = tokenizer.decode(tokenize_turns([USER], answer, tokenizer)[1])
        cut = tokenizer.decode(tokenize_turns([USER], answer, tokenizer, truncated=True)[1])
        assert squeezed(whole) == squeezed(cut + stop)
        assert cut.endswith(content)


@pytest.mark.parametrize("content", ["e", "end", "<", "<|end|", "|end|>", "legs?", f"{USER['content']} And more."])
def test_content_that_is_only_in_the_stop_token_or_the_prompt_is_left_out(tokenizer, content):
    tokenizer.chat_template = "{% for m in messages %}{{ m.content if m.role == 'user' else '' }}<|end|>{% endfor %}"
    with pytest.raises(ValueError, match="leaves out the content"):
        tokenize_turns([USER], [{**ANSWER, "content": content}], tokenizer)


@pytest.mark.parametrize(
    "name", ["gemma4_v5", "glm4moe", "gptoss", "lfm2_2_5", "nemotron_3_nano", "qwen3", "qwen3_5_think"]
)
def test_templates_that_write_reasoning(name):
    if name in ("gptoss", "lfm2_2_5") and not hasattr(chat_template_utils, "_alias_reasoning_fields"):
        pytest.skip("older releases of transformers do not pass reasoning as `thinking`, and the row is refused")
    tokenizer = tokenizer_of(name)
    for case in ("reasoning", "reasoning in the content"):
        _, ids, mask = tokenize_turns([USER], COMPLETIONS[case], tokenizer)
        assert "I count them." in own(tokenizer, ids, mask)[0]


@pytest.mark.parametrize("name", ["llama3", "qwen2_5"])
@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_that_a_template_leaves_out_is_refused(name, key):
    message = {**ANSWER, key: "I count\nthem."}
    with pytest.raises(
        ValueError, match=rf"chat template leaves out the {key} .*'I count\\nthem.'.* chat_template_path.* content as"
    ):
        tokenize_turns([USER], [message], tokenizer_of(name))


def test_reasoning_may_be_given_twice(tokenizer):
    content = COMPLETIONS["reasoning in the content"][0]["content"]
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.reasoning or '' }}{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    for more in ({"reasoning_content": "I count them."}, {"reasoning": "So.", "reasoning_content": "So."}):
        message = {**ANSWER, "content": content, **more}
        assert tokenizer.decode(tokenize_turns([USER], [message], tokenizer)[1]).endswith(f"{content}<|end|>")


def test_a_call_that_a_template_leaves_out_is_refused():
    """GPT-OSS's template writes only the first of two calls of the same tool."""
    with pytest.raises(ValueError, match="leaves out the call of multiply"):
        tokenize_turns([USER], COMPLETIONS["two calls"], tokenizer_of("gptoss"))
    old = {**ANSWER, "function_call": CALL["function"]}
    with pytest.raises(ValueError, match="leaves out the call of multiply"):
        tokenize_turns([USER], [old], tokenizer_of("qwen2_5"))


def test_arguments_that_the_own_template_cannot_write_are_written_by_trls():
    tokenizer = tokenizer_of("deepseekv3")
    _, ids, mask = tokenize_turns([USER], COMPLETIONS["tool"], tokenizer)
    called, answer = own(tokenizer, ids, mask)
    assert '{"a": 2, "b": 3}' in called
    assert answer == "It has 4 legs.<｜end▁of▁sentence｜>"
    tokenizer.chat_template += "{# of somebody else #}"
    with pytest.raises(ValueError, match="cannot write these messages: can only concatenate str"):
        tokenize_turns([USER], COMPLETIONS["tool"], tokenizer)


def test_the_generation_prompt_is_context_in_later_turns_too():
    """The `{% generation %}` blocks of GPT-OSS's template include the generation prompt, which is not learned."""
    tokenizer = tokenizer_of("gptoss")
    _, ids, mask = tokenize_turns([USER], COMPLETIONS["two turns"], tokenizer)
    said = "<|channel|>final<|message|>"
    assert own(tokenizer, ids, mask) == [f"{said}It has 4 legs.<|end|>", f"{said}Still 4.<|return|>"]


def test_a_block_may_be_the_generation_prompt_alone(tokenizer):
    tokenizer.chat_template = BLOCKS
    _, ids, mask = tokenize_turns([USER], [ANSWER, USER, {**ANSWER, "content": ""}], tokenizer)
    assert own(tokenizer, ids, mask) == ["It has 4 legs.<|end|>", "<|end|>"]


def test_an_empty_turn_is_its_stop_token():
    tokenizer = tokenizer_of("glm4moe")
    assert tokenizer.decode(tokenize_turns([USER], [{**ANSWER, "content": ""}], tokenizer)[1]) == "<|user|>"


def test_white_space_behind_the_generation_prompt_is_the_models(tokenizer):
    tokenizer.chat_template = BLOCKS
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=True)  # like the tokenizers of Llama and Qwen
    _, ids, mask = tokenize_turns([USER], [ANSWER, USER, ANSWER], tokenizer, truncated=True, space=" ")
    assert own(tokenizer, ids, mask) == [" It has 4 legs.<|end|>", " It has 4 legs."]


def test_blocks_that_are_not_turns_are_refused(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '.' if loop.last and loop.index == 3 }}[{{ m.role }}]"
        "{% generation %}{{ m.content }}{% endgeneration %}<|end|>{% endfor %}"
    )
    with pytest.raises(ValueError, match="blocks of its chat template mark 3 turns, and the assistant has 2"):
        tokenize_turns(PROMPT, PLAIN, tokenizer)
