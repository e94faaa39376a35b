"""The trainers load few modules of the package, and train without `fcntl`, which Windows lacks.

`pyproject.toml` defines the imports that each module may have, and `make lint` checks them.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import topr_trl

PACKAGE = Path(topr_trl.__file__).parent
ABOVE = ("cli", "evaluation", "experimental", "generation", "hub", "importing", "pipeline", "sandbox", "tasks")
BELOW = ("data", "settings", "trainers")
LIMIT = 59  # maximum number of loaded modules of the package, including its folders

TWO_STEPS_OF_EACH = """
import sys

sys.modules["fcntl"] = None  # there is none on Windows
import topr_trl.trainers.offline
import topr_trl.trainers.online

loaded = sorted(name for name in sys.modules if name.partition(".")[0] == "topr_trl")
from datasets import Dataset

from topr_trl import OfflineTOPRConfig, OfflineTOPRTrainer, TOPRConfig, TOPRTrainer

model, out = sys.argv[1:]
settings = {"max_steps": 2, "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True}
rows = [
    {"prompt": f"{n} + 1 =", "completion": f" {n + n % 2}.", "reward": 1.0 if n % 2 else -1.0} for n in range(8)
]
offline = OfflineTOPRTrainer(model, OfflineTOPRConfig(out + "/offline", **settings), Dataset.from_list(rows))
offline.train()
online = TOPRTrainer(
    model,
    lambda completions, **_: [(-1.0) ** i for i in range(len(completions))],
    args=TOPRConfig(out + "/online", num_generations=4, max_completion_length=8, **settings),
    train_dataset=Dataset.from_list(rows).select_columns(["prompt"]),
)
online.train()
print("steps", offline.state.global_step, online.state.global_step)
print(*loaded, sep="\\n")
"""


@pytest.mark.slow
def test_the_trainers_load_little_and_train_without_fcntl(tmp_path):
    command = [sys.executable, "-c", TWO_STEPS_OF_EACH, str(PACKAGE / "tasks" / "careless_model"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    steps, _, loaded = done.stdout.partition("\nsteps ")[2].partition("\n")
    assert steps == "2 2"
    modules = loaded.split()
    assert {"topr_trl", "topr_trl.trainers.online", "topr_trl.trainers.log_mu", "topr_trl.data.collator"} <= set(
        modules
    )
    assert not [name for name in modules if name.split(".")[1:2] and name.split(".")[1] in ABOVE]
    assert len(modules) <= LIMIT


def test_no_import_of_the_package_hides_in_a_function_of_the_trainers():
    """Functions may import optional packages (deepspeed, matplotlib, peft), but no modules of topr_trl."""
    below = [
        path
        for path in (*PACKAGE.glob("*.py"), *(path for name in BELOW for path in (PACKAGE / name).rglob("*.py")))
        if path.name != "__main__.py"
    ]
    assert len(below) > 35
    for path in below:
        nodes = ast.walk(ast.parse(path.read_text()))
        functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        for node in (inner for function in functions for inner in ast.walk(function)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.startswith(("topr_trl", "."))], f"{path.name}:{node.lineno}"
