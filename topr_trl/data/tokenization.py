"""Tokenize rows for the offline trainer."""

import json
import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, List, Value
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from trl import is_conversational

from topr_trl.data.chat_templates import Messages
from topr_trl.data.masks import MASK, apply_masks, have_masks, is_list, written
from topr_trl.data.messages import plain_messages, plain_tools, tokenize_turns
from topr_trl.data.rendering import render_prompt
from topr_trl.data.rows import FINISH_REASONS, MalformedRow
from topr_trl.data.text_tokens import completion_ids, encode_prompt, token_ids


def _is_ids(value: object) -> bool:
    """Whether a value is a nonempty list of integers that fit in int32."""
    return isinstance(value, list) and bool(value) and all(type(x) is int and abs(x) < 2**31 for x in value)


_TAIL = 64  # number of tokens at the end of a prompt that can change how its completion is tokenized
_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["']role["']\s*:""")
_MASKING = (MASK, "sampler_logps")  # columns that can mark context


class TokenizedRow(NamedTuple):
    """Token ids of prompt and completion, and the completion mask. The mask is None if the model wrote all tokens."""

    prompt_ids: list[int]
    completion_ids: list[int]
    completion_mask: list[bool] | None = None


def tokenize_row(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> TokenizedRow:
    """Return the token ids of a row's prompt and completion, and the completion mask.

    Token ids in the row are unchanged. A text prompt gets one BOS token if the tokenizer adds BOS tokens. A text
    completion continues the prompt: the tokenizer adds nothing between them. Messages are rendered with the chat
    template. In a completion of messages, all text is context except assistant messages without `"weight": 0`. A
    completion of text or messages ends with the stop token, unless `finish_reason` of the row or of the last message is
    `"length"`.

    Raises:
        ValueError: prompt or completion is missing, empty, or neither text, messages nor token ids; the prompt is JSON
            text with messages; the messages, the mask or the finish reason are malformed; the tokenizer lacks a chat
            template or stop token that the row needs, or merges the start of the completion with the prompt; or the
            chat template cannot write the messages.
    """
    prompt = row.get("prompt_ids") or row["prompt"]
    completion = row.get("completion_ids") or row.get("completion")
    if not completion:
        raise ValueError("the completion is empty")
    if not prompt:
        raise ValueError("the prompt is empty")
    if isinstance(prompt, str) and _MESSAGES.match(prompt) and prompt.rstrip().endswith("]"):
        raise ValueError("its prompt is JSON text of messages. Write a list, or use topr import --format table")
    if row.get(MASK) is not None and not row.get("completion_ids"):
        raise ValueError(
            f"it has a {MASK} and no completion_ids: a mask needs token ids. Add the ids, or drop the mask"
        )
    is_cut, in_chat = _is_cut(row), is_conversational({"prompt": prompt})
    if in_chat:
        _need_chat_template(tokenizer)
        if is_conversational({"completion": completion}):
            prompt, completion, is_own = tokenize_turns(
                prompt, completion, tokenizer, row.get("tools"), is_cut, **template_options(row)
            )
            return TokenizedRow(prompt, completion, None if all(is_own) else is_own)
        prompt = encode_messages(prompt, tokenizer, row)
    text = prompt if isinstance(prompt, str) else None
    if isinstance(completion, str) and (text is not None or _is_ids(prompt)):
        before = text if text is not None else tokenizer.decode([token for token in prompt[-_TAIL:] if token >= 0])
        completion = completion_ids(completion, before, tokenizer, template_options(row), in_chat, is_cut)
    if text is not None:
        prompt = encode_prompt(text, tokenizer)
    for name, ids in (("prompt", prompt), ("completion", completion)):
        if ids == []:
            raise ValueError(f"the {name} has no token: the tokenizer removes all of its text")
    if not _is_ids(prompt) or not _is_ids(completion):
        raise ValueError("prompt and completion must be text, messages (both of them) or token ids")
    # With dtype float, None in a list becomes NaN.
    mask, logps = (None if row.get(name) is None else np.array(row[name], dtype=float) for name in _MASKING)
    if mask is None and logps is None:
        return TokenizedRow(prompt, completion)
    own = written(mask, logps, len(completion))
    return TokenizedRow(prompt, completion, None if own.all() else own.tolist())


def _is_cut(row: dict[str, Any]) -> bool:
    """Return whether a row, or the last message of its completion, says that the completion was cut.

    Raises:
        ValueError: the finish reason is unknown.
    """
    reason: Any = row.get("finish_reason")
    completion: Any = row.get("completion")
    if reason is None and not row.get("completion_ids") and is_conversational({"completion": completion}):
        reason = completion[-1].get("finish_reason")  # Some logs have the reason in the message.
        reason = "stop" if reason in ("tool_calls", "function_call") else reason
    if reason not in FINISH_REASONS:
        raise ValueError(
            f"its finish_reason is {str(reason)[:40]!r}, and must be stop or length: length if the completion was cut"
        )
    return bool(reason == "length")


# The trainer sets these arguments when it renders messages.
_OWN_OPTIONS = {
    "tools", "truncated", "chat_template", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip


def template_options(row: dict[str, Any]) -> dict[str, Any]:
    """Return the `chat_template_kwargs` of a row. They can be JSON text, so that rows can have different arguments.

    Raises:
        ValueError: the arguments are not an object, or include an argument that the trainer sets.
    """
    given = row.get("chat_template_kwargs") or {}
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its chat_template_kwargs are not valid JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"its chat_template_kwargs are {str(found)[:60]}, and must be an object")
    if own := sorted(_OWN_OPTIONS & set(found)):
        raise ValueError(f"its chat_template_kwargs have {', '.join(own)}, which the trainer sets. Remove them")
    # A table adds a null for each argument that only other rows have.
    return {name: value for name, value in found.items() if value is not None}


def writes_todays_date(rows: Dataset, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template writes today's date into prompts, judging by the first row.

    A row with `prompt_ids` needs no template. In Llama's templates, the argument `date_string` replaces today's date.

    Args:
        rows ([`~datasets.Dataset`]): Rows.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer of the model.
    """
    if len(rows) == 0 or "strftime_now" not in str(tokenizer.chat_template):
        return False
    first = rows.with_format(None)[0]
    is_rendered = not first.get("prompt_ids") and is_conversational({"prompt": first["prompt"]})
    return is_rendered and "date_string" not in template_options(first)


def _need_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.chat_template:
        raise ValueError(
            "it holds messages, and the tokenizer has no chat template for them. Set chat_template_path "
            "(or tokenizer.chat_template), or give prompts and completions as text (imported files: remove the folder "
            "`imported` of the output, and add --chat false)"
        )


def encode_messages(prompt: Messages, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> list[int]:
    """Return the token ids of a prompt of messages, with the generation prompt.

    If the last message is from the assistant, the completion continues this message, and there is no generation prompt.

    Args:
        prompt (`list[dict]`): Messages.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer with a chat template.
        row (`dict`): Row, optionally with `tools` and `chat_template_kwargs` for the chat template.

    Raises:
        ValueError: the tokenizer has no chat template, the row is malformed, the role of the last message
            is not user, tool or assistant, or the template leaves out a part of a message or a tool.
    """
    _need_chat_template(tokenizer)
    options = {"tools": plain_tools(row.get("tools")), **template_options(row)}
    return token_ids(render_prompt(plain_messages(prompt), tokenizer, options), tokenizer)


def is_of_mistral_common(tokenizer: object) -> bool:
    """Return whether a tokenizer is that of mistral-common, which transformers prefers if it is installed."""
    return type(tokenizer).__name__ == "MistralCommonBackend"


def tokenizer_of(
    processing_class: PreTrainedTokenizerBase | ProcessorMixin, template_was_set: bool = False
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a processor, or the tokenizer that is given.

    The tokenizer gets the processor's chat template if it has none, or if `chat_template_path` has set the template.
    TRL sets it only in the processor.

    Raises:
        ValueError: the tokenizer is that of mistral-common, which has no chat template.
    """
    if is_of_mistral_common(processing_class):
        raise ValueError(
            "processing_class: the tokenizer of mistral-common has no chat template. Give the one of Hugging Face: "
            "processing_class=AutoTokenizer.from_pretrained(name, mistral_format=False)"
        )
    if not isinstance(processing_class, ProcessorMixin):
        return processing_class
    tokenizer: PreTrainedTokenizerBase = processing_class.tokenizer
    if template_was_set or not tokenizer.chat_template:
        tokenizer.chat_template = processing_class.chat_template
    return tokenizer


def tokenize(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, keep: Sequence[str] = (), **map_kwargs: Any
) -> Dataset:
    """Tokenize rows into `input_ids` (prompt and completion), `prompt_length`, and the columns in `keep`.

    If a row has context, the result has a `completion_mask`. See `topr_trl.data.masks`. If the dataset is stored
    in files, the result is cached.

    Args:
        dataset ([`~datasets.Dataset`]): Rows with prompts and completions. See `tokenize_row`.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer of the model.
        keep (`Sequence[str]`, *optional*, defaults to `()`): Columns to keep. Include `sampler_logps` if null values in
            this column mark context.
        **map_kwargs (`Any`): Arguments of `datasets.Dataset.map`.

    Raises:
        MalformedRow: `tokenize_row` raised a ValueError for a row, or a mask is malformed.
        ValueError: a column of token ids has a null or a value that is not a token id.
    """
    given_as_ids = _has_ids(dataset, "prompt_ids") and _has_ids(dataset, "completion_ids")
    masks = {MASK} & set(dataset.column_names) if given_as_ids else set()
    kept = {name: dataset.features[name] for name in (*keep, *masks)}
    features = Features({**kept, "input_ids": List(Value("int32")), "prompt_length": Value("int32")})
    map_kwargs.update(features=features, remove_columns=[n for n in dataset.column_names if n not in kept])
    if given_as_ids:
        rows = dataset.with_format("arrow").map(
            _join_ids, batched=True, fn_kwargs={"keep": list(kept), "package": _VERSION}, **map_kwargs
        )
    else:
        features[MASK] = List(Value("bool"))
        rows = dataset.with_format(None).map(
            _tokenize_for_map, with_indices=True, fn_kwargs={"tokenizer": tokenizer, "package": _VERSION}, **map_kwargs
        )
        if rows.data[MASK].null_count == len(rows.data):
            rows = rows.remove_columns(MASK)
    if have_masks(rows):
        rows = rows.with_format("arrow").map(
            _use_masks, batched=True, with_indices=True, fn_kwargs={"package": _VERSION},
            features=Features({**rows.features, MASK: List(Value("bool"))}),
        )  # fmt: skip
    return rows.with_format(None)


def _has_ids(dataset: Dataset, column: str) -> bool:
    """Whether a column has a nonempty list of integers in every row, including rows that `Dataset.select` left out."""
    if column not in dataset.column_names:
        return False
    ids = dataset.data[column]
    if not is_list(ids.type):
        return False
    shortest = pc.min(pc.list_value_length(ids).fill_null(0)).as_py()
    return pa.types.is_integer(ids.type.value_type) and bool(shortest)


_VERSION = version("topr_trl")  # part of the cache key of `datasets`: a different version can tokenize differently


def _join_ids(table: pa.Table, keep: list[str], package: str) -> pa.Table:
    # Token ids are most of the data, so they are never converted to Python objects.
    prompts, completions = (table[name].combine_chunks() for name in ("prompt_ids", "completion_ids"))
    lengths = np.stack([pc.list_value_length(ids) for ids in (prompts, completions)], axis=1)
    of_prompt = np.repeat(np.tile([True, False], len(table)), lengths.ravel())
    values = np.empty(len(of_prompt), dtype=np.int32)
    values[of_prompt], values[~of_prompt] = _ids(prompts, "prompt_ids"), _ids(completions, "completion_ids")
    offsets = np.concatenate([[0], lengths.sum(1).cumsum()]).astype(np.int32)
    joined = {"input_ids": pa.ListArray.from_arrays(offsets, values), "prompt_length": lengths[:, 0].astype(np.int32)}
    return pa.table({**{name: table[name] for name in keep}, **joined})


def _ids(lists: pa.ListArray, name: str) -> NDArray[np.int32]:
    values = lists.flatten()
    if values.null_count:
        raise ValueError(f"Column `{name}` holds {values.null_count} ids that are null. Drop these rows.")
    try:
        return values.cast(pa.int32()).to_numpy()
    except pa.ArrowInvalid as error:
        raise ValueError(f"Column `{name}` holds values that are not token ids: {error}.") from error


def _tokenize_for_map(
    row: dict[str, Any], index: int, tokenizer: PreTrainedTokenizerBase, package: str
) -> dict[str, Any]:
    try:
        prompt_ids, completion_ids, mask = tokenize_row(row, tokenizer)
    except ValueError as error:
        raise MalformedRow(index, str(error)) from None
    return {"input_ids": prompt_ids + completion_ids, "prompt_length": len(prompt_ids), MASK: mask}


def _use_masks(table: pa.Table, places: list[int], package: str) -> pa.Table:
    lengths = pc.subtract(pc.list_value_length(table["input_ids"]), table["prompt_length"])
    return apply_masks(table, lengths.to_pylist(), places)
