"""The site: pictures and reference match the source, and a browser shows every page whole."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import maxbatch
from maxbatch.commands import COMMANDS
from maxbatch.config.sections import KEYS, SECTIONS
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.system.errors import EXIT_CODES
from tests.helpers.chromium import ask
from tests.helpers.pages import PAGES, TOP

OVERFLOWING = """
const found = [];
for (const [address, width] of %s) {
  const frame = document.createElement("iframe");
  frame.style = `border: 0; width: ${width}px; height: 900px`;
  document.body.append(frame);
  await new Promise((next) => { frame.onload = next; frame.src = address; });
  await new Promise((next) => setTimeout(next, 200));
  const root = frame.contentDocument.documentElement;
  found.push([address, width, root.scrollWidth, frame.contentDocument.querySelectorAll("h1").length]);
  frame.remove();
}
return found;
"""


TABLES = OVERFLOWING.replace(
    "  const root = frame.contentDocument.documentElement;\n"
    '  found.push([address, width, root.scrollWidth, frame.contentDocument.querySelectorAll("h1").length]);\n',
    """
  const tables = [...frame.contentDocument.querySelectorAll(".md-typeset table:not([class])")];
  const wide = tables.filter((table) => table.getBoundingClientRect().right > width);
  const cell = tables[0].querySelectorAll("tbody td")[1];
  found.push([tables.length, wide.length, frame.contentWindow.getComputedStyle(cell).display, cell.dataset.label]);
""",
)


def tool(name: str) -> ModuleType:
    """A module of docs/tools, which is no package."""
    spec = importlib.util.spec_from_file_location(
        f"docs_{name}", TOP / "docs" / "tools" / f"{name}.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_are_those_of_the_plans() -> None:
    for name, svg in tool("pictures").pictures().items():
        drawn = (TOP / "docs" / "images" / name).read_text(encoding="utf-8")
        assert drawn == svg, f"docs/images/{name}: run python docs/tools/pictures.py"


def test_every_key_has_its_row_in_the_table_of_what_a_run_depends_on() -> None:
    page = (TOP / "docs" / "depends.md").read_text(encoding="utf-8")
    assert page == tool("depends").page(), "run python docs/tools/depends.py"
    of_keys = page.partition("## Keys")[2]
    assert sorted(re.findall(r"`(\w+)`", of_keys)) == sorted(KEYS)


def test_the_reference_holds_every_key_metric_command_exit_code_and_name() -> None:
    reference = tool("reference")
    keys_page = reference.keys_page()
    listed = {row[1] for row in re.finditer(r"^\| `(\w+)` \|", keys_page, re.M)}
    assert listed == set(KEYS)
    for key in (key for section in SECTIONS for key in section.declared):
        row = next(line for line in keys_page.splitlines() if line.startswith(f"| `{key.name}` |"))
        assert reference._plain(key.sentence).replace("|", r"\|") in row
    metrics = reference.on_page_markdown((TOP / "docs" / "metrics.md").read_text(encoding="utf-8"))
    for metric in Metric:
        assert f"| `{metric}` | {metric.kind} | {metric.unit} |" in metrics
    for name, command in COMMANDS.items():
        assert (
            f"## {name}\n" in reference.commands_page()
            and command.examples[0] in reference.commands_page()
        )
    for code, meaning in EXIT_CODES.items():
        assert f"| {code} | {meaning} |" in reference.exit_codes_page()
    for name in set(maxbatch.__all__) - {"__version__"}:
        assert f"::: maxbatch.{name}\n" in reference.python_page()


def test_every_page_stands_in_the_navigation() -> None:
    nav = (TOP / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r": ([\w/-]+\.md)$", nav, re.M))
    written = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    assert named == written | set(tool("reference").PAGES)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; strict: a broken link, a heading or a name that is not there fails."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (pip install 'maxbatch[docs]')")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=TOP,
        env=os.environ | {"PYTHONPATH": str(TOP)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """Where the site is served; a file:// page may not read its search index."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=site)
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.runs
def test_the_site_builds_and_documents_what_the_package_exports(site: Path) -> None:
    python = (site / "reference" / "python" / "index.html").read_text(encoding="utf-8")
    for name in set(maxbatch.__all__) - {"__version__"}:
        assert f'id="maxbatch.{name}"' in python, name
    metrics = (site / "metrics" / "index.html").read_text(encoding="utf-8")
    assert all(f"<code>{metric}</code>" in metrics for metric in Metric)
    assert (site / "launch" / "jobset.yml").is_file()


@pytest.mark.runs
def test_no_page_overflows_and_none_writes_to_the_console(site: Path, address: str) -> None:
    pages = sorted(path.parent.relative_to(site).as_posix() for path in site.rglob("index.html"))
    asked = [
        (f"{address}/{page}/".replace("/./", "/"), width) for page in pages for width in (1280, 400)
    ]
    (site / "frame.html").write_text('<html><body data-drawn="true"></body></html>')
    found, console = ask(site / "frame.html", OVERFLOWING % json.dumps(asked), served_at=address)
    assert len(found) == len(asked) >= 2 * len(pages) > 40
    assert [
        (page, width, wide)
        for page, width, wide, headings in found
        if wide > width or headings != 1
    ] == []
    assert console == []


@pytest.mark.runs
def test_tables_fit_the_page_and_are_stacked_on_a_phone(site: Path, address: str) -> None:
    (site / "frame.html").write_text('<html><body data-drawn="true"></body></html>')
    asked = [
        (f"{address}/{page}/", width)
        for page in ("batch-size", "reference/keys")
        for width in (1280, 400)
    ]
    found, _ = ask(site / "frame.html", TABLES % json.dumps(asked), served_at=address)
    for (page, width), (num_tables, num_wide, display, label) in zip(asked, found, strict=True):
        assert num_tables and not num_wide, (page, width)
        assert (display == "block", bool(label)) == (width == 400, True), (page, width)
