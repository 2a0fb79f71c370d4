"""The notebook runs from its first cell to its last, and its policy learns."""

import json

import pytest
from processes import ROOT, ran

NOTEBOOK = ROOT / "experiments" / "notebook" / "dapo.ipynb"


def code_cells():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_each_cell_compiles_and_shows_what_it_showed_last():
    """Outputs are committed: a cell that was changed and not executed again would lie."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    for number, source in enumerate(code_cells()):
        compile(source, f"cell {number}", "exec")
    counts = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))


@pytest.mark.slow
def test_the_notebook_runs_in_a_process_of_its_own(tmp_path):
    """As a person would run it, in its folder, but for two steps in place of twenty."""
    cells = code_cells()
    short = [cell.replace("config.num_steps = 20", "config.num_steps = 2") for cell in cells]
    assert short != cells
    shown = "\nprint('THE END', len(run.rows), sorted(run.evaluations.items())[0][1])"
    program = tmp_path / "notebook.py"
    program.write_text(
        "\n\n".join(short).replace('pathlib.Path("runs"', f"pathlib.Path({str(tmp_path)!r}") + shown
    )
    assert "THE END 2 {0: " in ran(program, cwd=NOTEBOOK.parent, MPLBACKEND="agg").stdout
