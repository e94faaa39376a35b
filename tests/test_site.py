"""Test the site in Chromium: pages on a phone."""

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests

pytest.importorskip("zensical", reason="the extra docs is not installed")

ROOT = Path(__file__).parent.parent
PAGES = [str(page.relative_to(ROOT / "docs").with_suffix(".html")) for page in sorted((ROOT / "docs").rglob("*.md"))]
pytestmark = pytest.mark.weekly


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Serve a copy of the site as `make docs` says, and return its address."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "zensical.toml", folder)
    for name in ("scripts", "topr_trl"):  # read for the API pages
        (folder / name).symlink_to(ROOT / name)
    with socket.create_server(("localhost", 0)) as free:
        host = f"localhost:{free.getsockname()[1]}"
    with subprocess.Popen([sys.executable, "-m", "zensical", "serve", "--dev-addr", host], cwd=folder) as server:
        try:
            for name in PAGES:
                wait_for(f"http://{host}/{name}")
            yield f"http://{host}"
        finally:
            server.terminate()


def wait_for(url):
    for _ in range(600):
        try:
            if requests.get(url, timeout=5).ok:
                return
        except requests.ConnectionError:
            pass
        time.sleep(0.1)
    raise TimeoutError(url)


def test_pages_fit_on_a_phone(browser, address):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    for name in PAGES:
        page.goto(f"{address}/{name}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
        commands = page.locator(".language-bash code")
        assert commands.evaluate_all("all => all.every(code => code.scrollWidth <= code.clientWidth)"), name
        tables = page.locator(".md-content table:not(:has(th:nth-child(5)))")
        assert tables.evaluate_all("all => all.every(table => table.getBoundingClientRect().right <= 390)"), name
