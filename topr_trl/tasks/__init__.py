"""Tasks: problems, prompts and judges."""

from topr_trl.tasks.task import DEFAULT_TASK, OWN_PROMPTS, TASKS, Task

__all__ = ["DEFAULT_TASK", "OWN_PROMPTS", "TASKS", "Task"]
