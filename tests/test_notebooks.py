"""The notebooks run from top to bottom, and show what they say: the model is better afterwards."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "examples" / "notebooks"
BETTER = {  # a cell that is added
    "first_run": "assert after.pass_at[1].value > before.pass_at[1].value + 0.05\n"
    "assert after.greedy.value > before.greedy.value + 0.1",
    "own_logs": "assert min(differences['greedy'].low, differences['pass@1'].low) > 0",
    "grpo_to_topr": "pass_at_1 = {name: found.pass_at[1].value for name, found in evaluations.items()}\n"
    "assert min(pass_at_1['GRPO'], pass_at_1['TOPR']) > pass_at_1['before'] + 0.03",
}


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook(path, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(path, 4)
    notebook.cells.append(nbformat.v4.new_code_cell(BETTER[path.stem]))
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_outputs_are_there_and_name_no_folder_of_a_machine(path):
    notebook = nbformat.read(path, 4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    text = path.read_text()
    assert not any(private in text for private in ("/work/", "/home/", "/tmp/", "/root/", "site-packages"))
