import pytest

from benchmarks.cells import Store

NEED_WEIGHTS = ("arms", "claims.base", "claims.hard_task", "claims.learning_rates", "claims.long_run",
                "claims.optimizers_compared", "claims.overlapped", "claims.trials", "online")  # fmt: skip


@pytest.fixture
def filled(tmp_path, monkeypatch):
    """`filled(claims, profile, planted)`: a store in which each cell of these claims has the result `planted(cell)`."""

    def fill(claims, profile, planted):
        for place in NEED_WEIGHTS:
            monkeypatch.setattr(f"benchmarks.{place}.model_hash", str)
        store = Store(tmp_path / "results")
        for claim in claims.values():
            while todo := store.unfinished(claim.cells(profile, store)):
                for cell in todo:
                    store.add(cell, planted(cell), 6.0, "command")
        return store

    return fill
