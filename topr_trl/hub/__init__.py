"""Push models and rows to the Hugging Face Hub."""

from topr_trl.hub.push import PushArguments, push_command, push_to_hub

__all__ = ["PushArguments", "push_command", "push_to_hub"]
