"""Run the tests with the newest and oldest supported versions, with each supported Python: `make test-matrix`.

    make test-matrix PYTHONS="3.12 3.13" VERSIONS=oldest

A cell of the matrix runs the tests that versions can break (`MOST_TESTS` in the Makefile). It replaces the environment
of the previous cell of its Python (5 GB with PyTorch's CUDA build). PyTorch has the same version in both cells.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".venv-matrix"
CONSTRAINTS = {"newest": "constraints.txt", "oldest": "constraints-min.txt"}
COUNTS = ("passed", "failed", "skipped")


def main(pythons: list[str], versions: list[str], tests: list[str]) -> None:
    if unknown := set(versions) - set(CONSTRAINTS):
        sys.exit(f"VERSIONS are {' and '.join(CONSTRAINTS)}, not {' '.join(sorted(unknown))}.")
    found = {python: interpreter(python) for python in pythons}
    if missing := [python for python, path in found.items() if path is None]:
        rest = " ".join(python for python in pythons if python not in missing)
        sys.exit(
            f"Python {', '.join(missing)} with the modules venv and ensurepip is neither on PATH (python{missing[0]}) "
            f"nor in pyenv's folder. Install it, or omit it: make test-matrix PYTHONS='{rest}'."
        )
    lines, passed = [], True
    for python, path in found.items():
        for version in versions:
            start = time.monotonic()
            result = cell(python, str(path), version, tests)
            passed &= result["status"] == "passed"
            counts = "".join(f"{result.get(name, ''):>9}" for name in COUNTS)
            minutes = (time.monotonic() - start) / 60
            lines.append(f"{python:<7} {version:<7} {pinned(version):<33}{counts}{minutes:>9.1f}  {result['status']}")
            print(lines[-1], flush=True)
    print(f"\n{'Python':<7} {'':<41}" + "".join(f"{name:>9}" for name in (*COUNTS, "minutes")), *lines, sep="\n")
    sys.exit(0 if passed else 1)


def interpreter(version: str) -> str | None:
    """Return the first interpreter of a version, on PATH or in pyenv's folder, that can create environments.

    Each interpreter is run, because a shim can fail or have a different version.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    named = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python{version}"))]
    ask = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    for path in filter(None, named):
        answer = subprocess.run([path, "-c", ask], capture_output=True, text=True, check=False)
        if answer.returncode == 0 and answer.stdout.strip() == version:
            return str(path)
    return None


def pinned(version: str) -> str:
    lines = (ROOT / CONSTRAINTS[version]).read_text().splitlines()
    names = dict(line.split("==") for line in lines if "==" in line)
    return f"TRL {names['trl']}, transformers {names['transformers']}"


def cell(python: str, path: str, version: str, tests: list[str]) -> dict[str, str]:
    """Install the versions and run the tests. Return the counts of tests, and a `status`."""
    environment = FOLDER / python
    print(f"\n== Python {python}, {version}: {pinned(version)}", flush=True)
    shutil.rmtree(environment, ignore_errors=True)
    install = ["make", "--no-print-directory", "install", f"PYTHON={path}", f"VENV={environment}",
               f"CONSTRAINTS={CONSTRAINTS[version]}", "EXTRAS=dev"]  # fmt: skip
    if subprocess.run(install, cwd=ROOT, check=False).returncode:
        return {"status": "INSTALLATION FAILED"}
    report = FOLDER / f"{python}-{version}.xml"
    report.unlink(missing_ok=True)
    workers = ["--numprocesses", os.environ.get("JOBS", "2"), "--dist", "loadgroup"]
    command = [environment / "bin" / "python", "-m", "pytest", "-q", f"--junitxml={report}", *workers, *tests]
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode
    if not report.is_file():
        return {"status": f"TESTS DIED ({code})"}
    suite = ElementTree.parse(report).getroot().find("testsuite")
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    return {
        "passed": str(passed),
        "failed": str(failed),
        "skipped": str(counts["skipped"]),
        "status": "passed" if code == 0 else "FAILED",
    }


if __name__ == "__main__":
    main(sys.argv[1].split(), sys.argv[2].split(), sys.argv[3:])
