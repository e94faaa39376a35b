import pytest


@pytest.fixture
def running(tmp_path):
    from recorders import recorder

    with recorder(tmp_path / "log") as found:
        yield found
