"""Tell from a field's name whether the field may hold the completion, a part of the prompt, or the reward."""

import re
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Any

# Names that select a column of a table. In `PROMPTS` and `COMPLETIONS`, an earlier name is preferred to a later one.
PROMPTS = ("prompt", "question", "instruction", "input", "query", "user_message", "user_input", "human", "problem",
           "message", "user")  # fmt: skip
COMPLETIONS = (
    "completion", "completions", "response", "responses", "generation", "generations", "prediction", "predictions",
    "model_output", "model_response", "model_answer", "model_completion", "actual_output", "generated_text",
    "generated_answer", "generated_response", "generated_output", "ai_response", "bot_response", "assistant_message",
    "reply", "answer", "output", "outputs", "assistant", "bot",
)  # fmt: skip
REWARDS = ("reward", "score", "rating", "label", "feedback", "thumbs", "thumb", "vote", "stars", "user_rating",
           "user_feedback", "like", "liked", "helpful", "rewards", "scores", "ratings")  # fmt: skip


class Kind(StrEnum):
    """Content that a field may have, judged by its name.

    `WRITTEN` is text that the model wrote. `ANSWER` is text of the model or the correct answer. `ASKED` is a part of
    the prompt. `ABOUT` describes the row. `UNKNOWN` is for all other names.
    """

    WRITTEN = "written"
    ANSWER = "answer"
    ASKED = "asked"
    ABOUT = "about"
    UNKNOWN = "unknown"


# Names for the model as the author, alone (`bot`) or before another word (`bot_text`).
_WRITERS = ("assistant", "bot", "chatbot", "gpt", "chatgpt", "llm", "sampled")
# The last word of a name says what the field holds: `system_fingerprint` is a fingerprint, `final_answer` an answer.
# Words before the last word can change the kind: the model wrote the text in `generated_text`.
_BY_LAST_WORD = {
    **dict.fromkeys(
        ("completion", "response", "generation", "prediction", "pred", "reply", "continuation", "hypothesis",
         "candidate", "resp", "hyp", "rollout", "reasoning", "thinking", "thought", "cot", "scratchpad", "preferred",
         "chosen", "rejected", *_WRITERS),
        Kind.WRITTEN,
    ),
    **dict.fromkeys(("answer", "output", "result", "solution", "code", "final", "outcome"), Kind.ANSWER),
    **dict.fromkeys(
        ("prompt", "question", "instruction", "input", "query", "context", "history", "passage", "document", "doc",
         "system", "background", "persona", "conversation", "dialogue", "dialog", "chat", "transcript", "turn",
         "article", "story", "paragraph", "problem", "example", "shot", "option", "choice", "human", "premise",
         "evidence", "schema", "table", "preamble", "knowledge", "memory", "chunk", "snippet", "demonstration",
         "excerpt", "scenario", "tool", "text", "content", "body"),
        Kind.ASKED,
    ),
    **dict.fromkeys(
        ("id", "ids", "uuid", "uid", "key", "hash", "fingerprint", "name", "model", "version", "type", "kind",
         "format", "time", "timestamp", "date", "day", "at", "on", "by", "url", "uri", "link", "path", "file",
         "filename", "status", "state", "reason", "language", "lang", "locale", "split", "category", "tag", "level",
         "difficulty", "domain", "group", "role", "author", "index", "idx", "number", "token", "logprob", "length",
         "size", "cost", "price", "latency", "duration", "object", "provider", "engine", "dataset", "origin",
         "license", "comment", "note", "explanation", "user", "rationale", "critique", "justification", "remark",
         "feedback", "annotation", "judgment", "judgement", "verdict", "error", "metadata", "meta", "info", "score",
         "rating", "grade", "rank", "confidence", "logp", "session", "environment", "env", "region", "finish",
         "effort", "bytes", "enum", "required", "arguments", "param", "header", "ip", "agent", "device", "platform"),
        Kind.ABOUT,
    ),
}  # fmt: skip
# Words that add nothing to the word before them, as in `response_text`, or to the outer field, as in `response.text`.
_PLAIN = {"text", "content", "value", "message", "body", "string", "str", "raw", "part", "data", "field", "json", "txt"}
# Words that make a field a reference answer, a number, a time, an earlier version, or the text of a judge.
_REFERENCE = {"reference", "ref", "gold", "golden", "gt", "ground", "truth", "expected", "target", "correct", "ideal",
              "canonical", "true", "right", "label", "original", "raw", "seed", "num", "count", "judge", "grader",
              "evaluator", "annotator", "critic", "time"}  # fmt: skip
# A name whose last word is one of these is a part of the prompt, whatever the words before it are.
_SOURCES = {"context", "document", "doc", "passage", "evidence", "chunk"}
_BY_MODEL = {"generated", "predicted", "actual", "model", "ai", "claude", "gemini", "llama", "qwen", "mistral",
             "deepseek", "our", "my", *_WRITERS}  # fmt: skip
# Last words of names whose value is often an id, a number or a setting, and not text of the conversation.
_OFTEN_SHORT = {"conversation", "chat", "dialogue", "dialog", "turn", "transcript", "document", "doc", "reasoning",
                "thinking", "thought", "cot", "knowledge", "memory", "source", "example", "tool"}  # fmt: skip


_SINGULAR = {*_BY_LAST_WORD, *_REFERENCE}


@lru_cache(maxsize=4096)
def normalized(name: Any) -> str:
    """Return a name in lower case. Each run of characters other than a-z and 0-9 inside it becomes an underscore."""
    return re.sub(r"[^a-z0-9]+", "_", str(name).strip().lower()).strip("_")


def words_of(name: str) -> list[str]:
    """Return the words of a name in lower case, such as `chat` and `history` for `chatHistory2`.

    Known words become singular.
    """
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(name))
    words = re.findall(r"[a-z]+", split.lower())
    return [word[:-1] if word.endswith("s") and word[:-1] in _SINGULAR else word for word in words]


@lru_cache(maxsize=4096)
def kind_of(path: Sequence[str]) -> Kind:
    """Return the kind of a field.

    Args:
        path (`Sequence[str]`): Names from the outer to the inner field, such as `("choices", "message", "content")`. A
            name without a meaning of its own, such as `content` or `x`, has the meaning of the field around it.
    """
    if normalized(path[-1]) in PROMPTS[:-1]:  # `user`, the last name, is often an id.
        return Kind.ASKED
    if any("history" in words_of(name) for name in path[:-1]):
        return Kind.ASKED
    words = list[str]()
    for name in reversed(path):
        words = words_of(name) + words
        if (kind := _kind_of_words(words)) is not Kind.UNKNOWN and set(words) - _PLAIN:
            return kind
        if set(words) - _PLAIN:
            words = []
    return _BY_LAST_WORD.get(words[-1] if words else "", Kind.UNKNOWN)


def _kind_of_words(words: list[str]) -> Kind:
    last = next((word for word in reversed(words) if word not in _PLAIN), "")
    kind = _BY_LAST_WORD.get(last, Kind.UNKNOWN)
    if last in _SOURCES:
        return Kind.ASKED
    if (
        kind is Kind.WRITTEN
        and set(words) & {"original", "raw"}
        and not set(words) & (_REFERENCE - {"original", "raw"})
    ):
        return kind
    if set(words) & _REFERENCE or last == "model" or words[-2:] == ["tool", "choice"]:
        return Kind.ABOUT
    by_model = set(words) & _BY_MODEL
    if by_model and (kind is Kind.ANSWER or words[-1] in _PLAIN or (kind is Kind.UNKNOWN and by_model != {"model"})):
        return Kind.WRITTEN
    return kind


def is_often_short(path: Sequence[str]) -> bool:
    """Return whether a single word in this field is probably an id or a setting, such as `c17` in `conversation`.

    Args:
        path (`Sequence[str]`): Names from the outer to the inner field.
    """
    return bool(_OFTEN_SHORT & set(words_of(path[-1])[-1:]))
