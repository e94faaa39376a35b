"""Tasks: problems, prompts and judges."""

from topr_trl.tasks.task import TASKS, Task

__all__ = ["TASKS", "Task"]
