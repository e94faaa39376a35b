"""Tell from a field's name whether the field may hold the completion, a part of the prompt, or the reward."""

import re
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Any

# Names that select a column of a table. A name that comes first in `COMPLETIONS` is preferred.
PROMPTS = ("prompt", "question", "instruction", "input", "query", "user_message", "user_input", "human", "problem",
           "message", "user")  # fmt: skip
COMPLETIONS = (
    "completion", "completions", "response", "responses", "generation", "generations", "prediction", "predictions",
    "model_output", "model_response", "model_answer", "model_completion", "actual_output", "generated_text",
    "generated_answer", "generated_response", "generated_output", "ai_response", "bot_response", "assistant",
    "assistant_message", "bot", "reply", "answer", "output", "outputs",
)  # fmt: skip
REWARDS = ("reward", "score", "rating", "label", "feedback", "thumbs", "thumb", "vote", "stars", "user_rating",
           "user_feedback", "rated", "like", "liked", "helpful", "rewards", "scores", "ratings")  # fmt: skip


class Kind(StrEnum):
    """Content that a field may have, judged by its name.

    `WRITTEN` is text that the model wrote. `ANSWER` is either such text or the correct answer. `ASKED` is a part of the
    prompt. `ABOUT` describes the row, and `UNKNOWN` is any other name.
    """

    WRITTEN = "written"
    ANSWER = "answer"
    ASKED = "asked"
    ABOUT = "about"
    UNKNOWN = "unknown"


# The last word of a name says what the field holds: `system_fingerprint` is a fingerprint, and `reference_answer` an
# answer. Words before it can change this: the text in `generated_text` was written by the model.
_BY_LAST_WORD = {
    **dict.fromkeys(
        ("completion", "response", "generation", "prediction", "pred", "reply", "continuation", "hypothesis",
         "candidate", "sampled", "resp", "assistant", "bot", "chatbot", "gpt", "chatgpt", "llm", "hyp", "rollout",
         "reasoning", "thinking", "thought", "cot", "scratchpad", "preferred", "chosen", "rejected"),
        Kind.WRITTEN,
    ),
    **dict.fromkeys(("answer", "output", "result", "solution", "code", "final", "outcome"), Kind.ANSWER),
    **dict.fromkeys(
        ("prompt", "question", "instruction", "input", "query", "context", "history", "passage", "document", "doc",
         "system", "background", "persona", "conversation", "dialogue", "dialog", "chat", "transcript", "turn",
         "article", "story", "paragraph", "problem", "example", "shot", "option", "choice", "human", "premise",
         "evidence", "schema", "table", "preamble", "knowledge", "memory", "chunk", "snippet", "demonstration",
         "excerpt", "scenario", "text", "content", "body"),
        Kind.ASKED,
    ),
    **dict.fromkeys(
        ("id", "ids", "uuid", "uid", "key", "hash", "fingerprint", "name", "model", "version", "type", "kind",
         "format", "time", "timestamp", "date", "day", "at", "on", "by", "url", "uri", "link", "path", "file",
         "filename", "status", "state", "reason", "language", "lang", "locale", "split", "category", "tag", "level",
         "difficulty", "domain", "group", "role", "author", "email", "index", "idx", "number", "count", "token",
         "logprob", "length", "size", "cost", "price", "latency", "duration", "seed", "object", "provider", "engine",
         "dataset", "origin", "license", "comment", "note", "explanation", "source", "user", "rationale", "critique",
         "justification", "remark", "review", "feedback", "annotation", "annotator", "judge", "judgment", "judgement",
         "verdict", "reference", "gold", "gt", "expected", "target", "truth", "ideal", "error", "metadata", "meta",
         "info", "session", "environment", "env", "region", "finish", "effort", "bytes", "enum", "required",
         "arguments", "param", "header", "ip", "agent", "device", "platform"),
        Kind.ABOUT,
    ),
}  # fmt: skip
# Words that say nothing if another word stands before them, or a field around them.
_PLAIN = {"text", "content", "value", "message", "body", "string", "str", "raw", "part", "data", "field", "json", "txt"}
_REFERENCE = {"reference", "gold", "golden", "gt", "ground", "truth", "expected", "target", "correct", "ideal",
              "canonical", "true", "right", "label"}  # fmt: skip
_BY_MODEL = {"generated", "predicted", "actual", "model", "bot", "assistant", "ai", "llm", "gpt", "chatgpt", "chatbot",
             "claude", "gemini", "llama", "qwen", "mistral", "deepseek", "sampled", "our", "my"}  # fmt: skip


@lru_cache(maxsize=4096)
def normalized(name: Any) -> str:
    """Return a column name in lower case, with underscores instead of spaces and punctuation."""
    return re.sub(r"[^a-z0-9]+", "_", str(name).strip().lower()).strip("_")


def words_of(name: str) -> list[str]:
    """Return the words of a name in lower case and singular, such as `chat` and `history` for `chatHistory2`."""
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(name))
    words = re.findall(r"[a-z]+", split.lower())
    return [word[:-1] if word.endswith("s") and word[:-1] in _BY_LAST_WORD else word for word in words]


@lru_cache(maxsize=4096)
def kind_of(path: Sequence[str]) -> Kind:
    """Return the kind of a field.

    Args:
        path (`Sequence[str]`): Names from the outer to the inner field, such as `("choices", "message", "content")`. A
            name without a meaning of its own, such as `content`, has the meaning of the field around it.
    """
    if normalized(path[-1]) in PROMPTS[:-1]:
        return Kind.ASKED
    words = list[str]()
    for name in reversed(path):
        words = words_of(name) + words
        if set(words) - _PLAIN:
            break
    last = next((word for word in reversed(words) if word not in _PLAIN), words[-1] if words else "")
    kind = _BY_LAST_WORD.get(last, Kind.UNKNOWN)
    if set(words) & _REFERENCE or last == "model":
        return Kind.ABOUT
    if set(words) & _BY_MODEL and kind in (Kind.ANSWER, Kind.UNKNOWN):
        return Kind.WRITTEN
    return kind
