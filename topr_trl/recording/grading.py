"""Receive rewards, and serve the page on which a person reads and grades rollouts."""

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from topr_trl.baseline import LARGEST_REWARD
from topr_trl.recording.protection import error, read_body
from topr_trl.recording.protocols import choice_of, messages_of
from topr_trl.recording.protocols.completions import prompt_of
from topr_trl.recording.redaction import Redactor
from topr_trl.recording.settings import RecordArguments
from topr_trl.recording.store import StorageFullError, Store
from topr_trl.recording.unrecorded import Unrecorded

_PAGE = Path(__file__).with_name("page.html")
_PER_REQUEST = 50  # maximum number of rollouts in a response
_INTERVALS = 40  # maximum number of points of a curve in the plot of mean rewards
_LONGEST_COMMENT = 10_000  # characters
_LONGEST_NAME = 100  # characters
_LONGEST_BODY = 1 << 17  # bytes of a request with a reward. An escaped character of the comment takes up to 12 bytes.
_LONGEST_SEARCH = 200  # characters
_LABELS = {True: 1.0, False: -1.0, "up": 1.0, "good": 1.0, "down": -1.0, "bad": -1.0}


class Grading:
    """HTTP handlers of the paths `/`, `/rewards` and `/rollouts`.

    Args:
        args (`RecordArguments`): Settings.
        store (`Store`): Database.
        redact (`Redactor`): Function that blanks out text in comments.
        unrecorded (`Unrecorded`): Counts of the requests that were not recorded.
    """

    def __init__(self, args: RecordArguments, store: Store, redact: Redactor, unrecorded: Unrecorded) -> None:
        self.args, self.store, self.redact, self.unrecorded = args, store, redact, unrecorded

    async def page(self, request: web.Request) -> web.Response:
        """Return the grading page. Its Content-Security-Policy prevents the model's text from running as a script."""
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff",
                   "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}  # fmt: skip
        text = _PAGE.read_text(encoding="utf-8").replace("NONCE", nonce)
        return web.Response(text=text, content_type="text/html", headers=headers)

    async def rollouts(self, request: web.Request) -> web.Response:
        """Return the latest rollouts that match the query, and totals of all rollouts.

        In the query, `graded=yes` selects rollouts with a rating, and `graded=no` selects rollouts with an answer that
        has no rating. `before` selects rollouts with a smaller number, and `search` finds rollouts with the given text.
        """
        graded = {"yes": True, "no": False}.get(request.query.get("graded", ""))
        before, search = request.query.get("before"), request.query.get("search") or None
        if search and len(search) > _LONGEST_SEARCH:
            return error(400, f"search must be text of at most {_LONGEST_SEARCH} characters.")
        if before is not None and not (before.isascii() and before.isdigit() and len(before) < 19):
            return error(400, "before must be the number of a rollout.")

        def read() -> web.Response:
            found = self.store.latest(graded, None if before is None else int(before), _PER_REQUEST, search)
            return _json({
                "rollouts": [_summary(each) for each in found], "more": len(found) == _PER_REQUEST,
                "totals": self.store.totals(_INTERVALS), "unrecorded": dict(self.unrecorded.counts),
            })  # fmt: skip

        return await _in_thread(read)

    async def rollout(self, request: web.Request) -> web.Response:
        """Return one rollout: the messages of its calls, its rewards and its comments."""
        name = request.match_info["name"]

        def read() -> web.Response:
            if (found := self.store.rollout(name)) is None:
                return error(404, f"There is no rollout {name!r}.")
            return _json({**found, "calls": [_shown(call) for call in found["calls"]]})

        return await _in_thread(read)

    async def reward(self, request: web.Request) -> web.Response:
        """Store or remove a reward of a rollout or an answer. A second reward of the same name replaces the first."""
        if request.content_type != "application/json":
            return error(415, "Send JSON, with the header Content-Type: application/json.")
        try:
            body = await read_body(request, self.args)
            if len(body) > _LONGEST_BODY:  # Parsing a longer body would delay all streams.
                return error(413, f"The request has {len(body):,} bytes, and {_LONGEST_BODY:,} are allowed.")
            given = json.loads(body)
            rollout, answer, name, reward, comment = read_reward(given)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as wrong:
            return error(400, f"The body of the request is not JSON: {wrong}.")
        except ValueError as wrong:
            return error(400, str(wrong))
        try:
            self.store.set_reward(rollout, name, reward, self.redact(comment), answer)
        except StorageFullError as full:
            return error(507, str(full), "storage_full")
        except (LookupError, ValueError) as wrong:
            return error(404 if isinstance(wrong, LookupError) else 409, str(wrong))
        return _json({"rollout_id": rollout, "name": name, "reward": reward} | ({"answer": answer} if answer else {}))


async def _in_thread(read: Callable[[], web.Response]) -> web.Response:
    """Call `read` in a thread, and return its response, or an error 500 if the database is unreadable.

    Long answers take seconds to read, which would block all streams.
    """
    try:
        return await asyncio.to_thread(read)
    except ValueError as unreadable:  # for instance a damaged database
        return error(500, str(unreadable), "server_error")


def _json(value: object) -> web.Response:
    return web.json_response(value, headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"})


def read_reward(given: Any) -> tuple[str, int, str, float | None, str | None]:
    """Check a request that sets a reward, and return its values. A label becomes the reward 1 or -1.

    Args:
        given (`Any`): JSON value of the request.

    Returns:
        `tuple[str, int, str, float | None, str | None]`: name of the rollout, number of the answer or 0 for the whole
            rollout, name of the reward, reward, and comment. The reward None removes the stored reward.

    Raises:
        ValueError: a field is missing, unknown or wrong. The message names the field.
    """
    if not isinstance(given, Mapping):
        raise ValueError('Send a JSON object such as {"rollout_id": "...", "reward": 1}.')
    known = {"rollout_id", "answer", "name", "reward", "label", "comment"}
    if unknown := sorted(set(given) - known):
        raise ValueError(f"{', '.join(unknown)}: unknown. Known fields are {', '.join(sorted(known))}.")
    rollout, name, comment = given.get("rollout_id"), given.get("name", "reward"), given.get("comment")
    if not isinstance(rollout, str) or not rollout:
        raise ValueError("rollout_id must be the text in the header x-topr-rollout of an answer.")
    answer = _answer(given.get("answer"))
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or "." in name:
        raise ValueError(f"name must be text of 1 to {_LONGEST_NAME} characters without a dot.")
    if comment is not None and not (isinstance(comment, str) and len(comment) <= _LONGEST_COMMENT):
        raise ValueError(f"comment must be text of at most {_LONGEST_COMMENT:,} characters.")
    for field, text in (("rollout_id", rollout), ("name", name), ("comment", comment or "")):
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError(f"{field} has half of a character (an unpaired surrogate).")
    if ("reward" in given) == ("label" in given):
        raise ValueError("Send either reward (a number) or label (true or false), and not both.")
    if "label" in given:
        label = given["label"]
        if not isinstance(label, bool | str) or label not in _LABELS:
            labels = ", ".join(map(str, _LABELS)).lower()
            raise ValueError(f"label must be one of {labels}, not {str(label)[:40]!r}.")
        return rollout, answer, name, _LABELS[label], comment
    reward = given["reward"]
    if reward is None:
        return rollout, answer, name, None, comment
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= LARGEST_REWARD:
        raise ValueError(f"reward must be a finite number, not {repr(reward)[:40]}. null removes it.")
    return rollout, answer, name, float(reward), comment


def _answer(given: Any) -> int:
    """Return the number of an answer, which can be the text of a header. Return 0 for None.

    Raises:
        ValueError: the value is not the number of an answer.
    """
    if given is None:
        return 0
    text = given.strip() if isinstance(given, str) else str(given) if type(given) is int else ""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
        raise ValueError(
            f"answer must be a number in the header x-topr-answer, from 1, not {repr(given)[:40]}. Without it, the "
            "reward is for the whole rollout."
        )
    return int(text)


def _summary(rollout: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rollout's entry in the list of the grading page, with its rewards and the start of its last answer."""
    call = _shown(rollout["calls"][-1])
    asked = next((turn.get("content") for turn in reversed(call["messages"]) if turn.get("role") == "user"), "")
    tools = [each.get("function") or {} for each in call["answer"].get("tool_calls") or ()]
    return {
        "number": rollout["number"], "rollout_id": rollout["rollout_id"], "rewards": rollout["rewards"],
        "answer_rewards": rollout["answer_rewards"], "answers": rollout["answers"], "ungraded": rollout["ungraded"],
        "started": call["started"], "state": call["state"], "model": call["model"],
        "asked": _text(asked)[:300], "answer": _text(call["answer"].get("content"))[:300],
        "called": [tool.get("name") for tool in tools],
    }  # fmt: skip


def _text(content: Any) -> str:
    """Return the content of a message as text. The content can be a list of parts."""
    if isinstance(content, list):
        content = "\n".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return str(content or "").strip()


def _shown(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a call that the grading page shows, such as messages, tools and the answer."""
    request, choice = call["request"], choice_of(call) or {}
    messages = messages_of(call)
    if messages is None:
        prompt = prompt_of(request, call["choice"])
        messages = [{"role": "user", "content": prompt if isinstance(prompt, str) else json.dumps(prompt)}]
    answer = choice.get("message") or {"role": "assistant", "content": choice.get("text")}
    return {
        "started": call["started"], "state": call["state"], "error": call["error"], "model": request.get("model"),
        "model_revision": call["model_revision"], "tools": request.get("tools"),
        "messages": messages, "answer": answer,
        "finish_reason": choice.get("finish_reason"), "number": call["number"], "rewards": call["rewards"],
        "comments": call["comments"],
    }  # fmt: skip
