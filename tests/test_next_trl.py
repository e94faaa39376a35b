"""Test the text of the issue that reports failed tests with a future release of TRL."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import next_trl


def test_moved_parts_of_trl_come_first(tmp_path, monkeypatch):
    monkeypatch.setattr(next_trl, "RESULTS", tmp_path / "results.xml")
    assert "pytest ends with 2, 0 tests fail" in next_trl.report(2)  # there is no file of results
    next_trl.RESULTS.write_text(
        '<testsuites><testsuite><testcase classname="tests.trainers.test_online" name="test_loss">'
        '<failure message="AssertionError: 1 != 2&#10;more">long</failure></testcase>'
        '<testcase classname="tests.test_contract" name="test_hook[_generate]">'
        '<failure message="_generate has another signature">long</failure></testcase>'
        '<testcase classname="tests.test_data" name="test_rows"/></testsuite></testsuites>'
    )
    first, _, moved, other, _ = next_trl.report(1).split("\n")
    assert first.endswith("pytest ends with 1, 2 tests fail.")
    assert moved == "- `tests.test_contract::test_hook[_generate]`: _generate has another signature"
    assert other == "- `tests.trainers.test_online::test_loss`: AssertionError: 1 != 2"
