"""Names of the settings that make a command import its input."""

IMPORT_SETTINGS = ("format", "reward_fields", "label_values", "prompt_field", "completion_field", "messages_field",
                   "ignore_fields", "chat")  # fmt: skip
