"""Names of version 0.1: functions warn and work, modules that moved are an error that says where they are."""

from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

FUNCTIONS = {
    "sample_candidates": "sample_completions",
    "score_candidates": "score_completions",
    "load_candidates": "load_rows",
    "save_candidates": "save_rows",
    "evaluate_candidates": "evaluate_rows",
}
MODULES = {
    "candidates": "data.rows and topr_trl.data.tables", "collator": "data.collator", "commands": "cli.commands",
    "comparison": "evaluation.bootstrap", "curves": "cli.run_report_curves", "evaluate_command": "cli.evaluate",
    "expectations": "evaluation.exact", "iterate": "pipeline.loop", "limits": "loss", "manifest": "pipeline.manifest",
    "plan": "cli.memory_plan", "plots": "evaluation.plots", "report": "evaluation.report", "run_page": "cli.run_report",
    "samples": "evaluation.answers", "sampling": "generation.sampling and topr_trl.generation.transformers",
    "sandbox_cell": "sandbox.child", "settings": "pipeline.arguments", "stages": "pipeline.stages",
    "step_order": "data.collator", "tokenizing": "data.tokenization", "verifier": "tasks.verifier",
    "vllm_sampling": "generation.vllm", "weights": "checkpoints", "worker_pool": "sandbox.worker_pool",
    "hub.candidates": "hub.dataset", "hub.lineage": "pipeline.lineage", "tasks.math_answers": "tasks.math_equal",
}  # fmt: skip


class MovedModules(MetaPathFinder):
    """Comes last among the finders, so it is asked only for modules that are not there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A ModuleNotFoundError that names the new place of a module that moved."""
        package, _, module = fullname.partition(".")
        if package == "topr_trl" and module in MODULES:
            raise ModuleNotFoundError(f"{fullname} is topr_trl.{MODULES[module]} now.", name=fullname)
        return None
