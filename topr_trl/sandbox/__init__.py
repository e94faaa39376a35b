"""Run model-written programs in a sandbox."""

from topr_trl.sandbox.unit_tests import run_tests

__all__ = ["run_tests"]
