"""Run the tests with a TRL that is not released or not supported yet: `make test-next TRL=git+https://…`.

The failed tests are written to `next-trl.md`, as text for an issue.
"""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

RESULTS, REPORT = Path("next-trl.xml"), Path("next-trl.md")


def main(jobs: str, *tests: str) -> int:
    command = [sys.executable, "-m", "pytest", *tests, f"--numprocesses={jobs}", "--dist=loadgroup"]
    status = subprocess.run([*command, f"--junitxml={RESULTS}"], check=False).returncode
    REPORT.write_text(report(status))
    return status


def report(status: int) -> str:
    """Return the failed tests. Contract tests come first, because they name the changed parts of TRL."""
    failed: list[tuple[str, str]] = []
    for case in ElementTree.parse(RESULTS).iter("testcase") if RESULTS.is_file() else ():
        for problem in (*case.iter("failure"), *case.iter("error")):
            first = (problem.get("message") or "").strip().splitlines() or [""]
            failed.append((f"{case.get('classname')}::{case.get('name')}", first[0][:300]))
    failed.sort(key=lambda one: "test_contract" not in one[0])
    lines = [f"- `{name}`: {message}" for name, message in failed[:50]]
    return "\n".join([f"TRL {version('trl')}: pytest ends with {status}, {len(failed)} tests fail.", "", *lines, ""])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
