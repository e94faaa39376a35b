"""Check that the built wheel works without the rest of this repository: `make wheel`.

    python scripts/check_wheel.py DIST PYTHON

DIST is the folder with the sdist and the wheel that was built from it. PYTHON is the interpreter of an environment in
which only the wheel is installed.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

IN_THE_WHEEL = ["topr_trl/py.typed", "topr_trl/__init__.pyi", "topr_trl/trainers/model_card.md"] + [
    f"topr_trl/tasks/{model}/{file}"
    for model in ("careless_model", "careless_verifier")
    for file in ("config.json", "model.safetensors", "tokenizer.json")
]
IN_THE_SDIST = ["LICENSE", "README.md", "pyproject.toml", *IN_THE_WHEEL]

# User code for mypy --strict, which reports an unused `type: ignore` if it does not find the package's annotations.
USERS_CODE = """\
from pathlib import Path

from topr_trl import OfflineTOPRConfig, TruncationLimits, curate, load_rows, topr_loss
from topr_trl.experimental import AsyncTOPRConfig

limits = TruncationLimits(0.0, 1.0, 0.0, 1.0)
share: float = OfflineTOPRConfig("out", preset="tis").limits.b_neg
OfflineTOPRConfig("out", baseline=0.5)
OfflineTOPRConfig("out", baseline="mean")
AsyncTOPRConfig("out", baseline="mean")
chosen: int = curate([1.0, -1.0], [0, 0], rule="uniform").chosen_positives
load_rows(Path("rows"))
curate([1.0, -1.0], [0, 0], rule=3)  # type: ignore[arg-type]
topr_loss("logps")  # type: ignore[call-arg, arg-type]
"""

DEMO = {
    "num_train_problems": 8, "num_test_problems": 4, "num_generations": 4, "num_generations_eval": 2,
    "max_new_tokens": 60, "iteration_size": 16, "max_steps": 2, "report_to": "none", "disable_tqdm": True,
    "use_cpu": True,
}  # fmt: skip


def main(dist: Path, python: Path) -> None:
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    check_files(wheel, sdist)
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment["PATH"] = f"{python.parent}{os.pathsep}{os.environ['PATH']}"

        def run(*command: str) -> str:
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-4_000:]}")
            return done.stdout

        where = run(str(python), "-c", "import topr_trl; print(topr_trl.__file__)").strip()
        if not Path(where).is_relative_to(python.parents[1]):
            sys.exit(f"topr_trl was imported from {where}, not from the wheel.")
        if "topr COMMAND --help" not in run("topr", "--help"):
            sys.exit("topr --help does not mention topr COMMAND --help.")
        print("The package can be imported, and topr --help works.", flush=True)
        (Path(folder) / "users.py").write_text(USERS_CODE)
        run(sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "users.py")
        print("User code passes mypy --strict, and mypy finds its mistakes.", flush=True)
        demo = run("topr", "iterate", "--output_dir=run", *(f"--{name}={value}" for name, value in DEMO.items()))
        print("topr iterate ends with", *demo.splitlines()[-10:], sep="\n")
        if not (Path(folder) / "run" / "iteration-1" / "model" / "model.safetensors").is_file():
            sys.exit("topr iterate did not write a model.")


def check_files(wheel: Path, sdist: Path) -> None:
    in_wheel = zipfile.ZipFile(wheel).namelist()
    with tarfile.open(sdist) as archive:
        in_sdist = [name.partition("/")[2] for name in archive.getnames()]
    missing = {
        wheel.name: [name for name in IN_THE_WHEEL if name not in in_wheel],
        sdist.name: [name for name in IN_THE_SDIST if name not in in_sdist],
    }
    if not any(name.endswith("licenses/LICENSE") for name in in_wheel):
        missing[wheel.name].append("LICENSE")
    for name, files in missing.items():
        if files:
            sys.exit(f"{name} lacks {', '.join(files)}.")
    foreign = [name for name in in_wheel if not name.startswith(("topr_trl/", "topr_trl-"))]
    if foreign:
        sys.exit(f"{wheel.name} has files outside the package: {', '.join(foreign[:5])}.")
    print(f"{wheel.name}: {len(in_wheel)} files, {wheel.stat().st_size / 1e6:.1f} MB; "
          f"{sdist.name}: {len(in_sdist)} files, {sdist.stat().st_size / 1e6:.1f} MB", flush=True)  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).absolute())
