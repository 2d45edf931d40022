"""The notebooks of the docs run, and become pages of the site."""

import base64
import json

import nbformat
import notebooks
import pytest

LARGEST = 200_000
"""Bytes of a notebook with its outputs."""


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.fixture(params=notebooks.NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


def test_there_are_two_notebooks():
    assert [path.stem for path in notebooks.NOTEBOOKS] == ["own_modules", "rewire_a_model"]


def test_a_notebook_is_committed_with_its_outputs_and_without_times(path):
    assert path.stat().st_size < LARGEST
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata == notebooks.KERNEL
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all("execution" not in cell.metadata for cell in cells)
    assert any("image/svg+xml" in output.get("data", {}) for cell in cells for output in cell.outputs)
    assert not any(
        output.output_type == "error" or output.get("name") == "stderr" for c in cells for output in c.outputs
    )


def test_a_notebook_uses_public_names_and_a_temporary_folder(path):
    source = "\n".join(cell.source for cell in code_cells(nbformat.read(path, as_version=4)))
    assert "import maskconnect as mc" in source
    assert "from maskconnect" not in source
    assert source.index("TemporaryDirectory") < source.index("mc.save") < source.index("mc.load")


@pytest.mark.docs
def test_a_notebook_runs_and_prints_what_it_did_where_that_is_the_same_on_every_machine(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before, after = nbformat.read(path, as_version=4), notebooks.executed(path)
    exact = [
        (text_of(old), text_of(new))
        for old, new in zip(code_cells(before), code_cells(after), strict=True)
        if "exact" in old.metadata.get("tags", [])
    ]
    assert len(exact) >= 3
    assert all(old == new != "" for old, new in exact)
    assert list(tmp_path.iterdir()) == []


def test_a_notebook_that_fails_is_an_error(tmp_path):
    with pytest.raises(Exception, match="ZeroDivisionError"):
        notebooks.executed(saved(tmp_path, nbformat.v4.new_code_cell("1 / 0")))


def saved(folder, *cells):
    path = folder / "made.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=list(cells)), path)
    return path


def test_a_page_has_text_code_outputs_and_pictures_in_order(tmp_path):
    png = base64.b64encode(b"picture").decode()
    code = nbformat.v4.new_code_cell("draw(model)")
    code.outputs = [
        nbformat.v4.new_output("stream", name="stdout", text="learned  97.1 %\n"),
        nbformat.v4.new_output("execute_result", data={"text/plain": "Drawing()", "image/svg+xml": "<svg/>"}),
        nbformat.v4.new_output("display_data", data={"image/png": png[:4] + "\n" + png[4:] + "\n"}),
        nbformat.v4.new_output("execute_result", data={"text/plain": "42"}),
    ]
    svg = base64.b64encode(b"<svg/>").decode()
    assert notebooks.markdown(saved(tmp_path, nbformat.v4.new_markdown_cell("# Title"), code)).split("\n\n") == [
        "# Title",
        "```python\ndraw(model)\n```",
        "```text\nlearned  97.1 %\n```",
        f"![Output of the code above](data:image/svg+xml;base64,{svg})",
        f"![Output of the code above](data:image/png;base64,{png})",
        "```text\n42\n```\n",
    ]


def test_the_page_of_a_notebook_has_all_of_its_cells(path):
    page = notebooks.markdown(path)
    assert page.startswith("# ")
    for cell in json.loads(path.read_text())["cells"]:
        assert "".join(cell["source"]) in page
    assert page.count("data:image/svg+xml;base64,") == 1
