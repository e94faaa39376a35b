"""Define tasks. A task consists of problems, prompts and a judge."""

from topr_trl.tasks.task import DEFAULT_TASK, OWN_PROMPTS, TASKS, Task

__all__ = ["DEFAULT_TASK", "OWN_PROMPTS", "TASKS", "Task"]
