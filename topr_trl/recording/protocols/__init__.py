"""APIs whose calls are recorded. A new API needs a module with its protocol, and an entry in `PROTOCOLS`."""

from collections.abc import Mapping
from typing import Any

from topr_trl.recording.protocols import completions, messages, ollama, responses
from topr_trl.recording.protocols.protocol import Protocol

PROTOCOLS: dict[str, Protocol] = {
    each.endpoint: each for each in (*completions.PROTOCOLS, responses.PROTOCOL, messages.PROTOCOL, ollama.PROTOCOL)
}


def choice_of(call: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the choice in a call's answer that belongs to the rollout. Return None if the answer lacks this choice.

    Args:
        call (`Mapping[str, Any]`): Call in a rollout from `read_rollouts`.
    """
    choices = PROTOCOLS[call["endpoint"]].choices(call["response"] or {})
    return next((choice for choice in choices if choice.get("index", 0) == call["choice"]), None)


def messages_of(call: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """Return the messages in a call's request as in OpenAI's chat completions. Return None without a list of messages.

    Args:
        call (`Mapping[str, Any]`): Call in a rollout from `read_rollouts`.
    """
    return PROTOCOLS[call["endpoint"]].messages(call["request"])
