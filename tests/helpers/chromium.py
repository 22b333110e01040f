"""Pages as a reader's browser shows them: headless Chromium, no network, nothing but the command
line.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

_PROBE = """
<script>
(async () => {
  for (let i = 0; i < 600 && !document.body.dataset.drawn; i++) await new Promise((next) => setTimeout(next, 50));
  const answer = await (async () => { %s })();
  const element = document.createElement("pre");
  element.id = "probe";
  element.textContent = JSON.stringify(answer);
  document.body.append(element);
})();
</script>
"""


def ask(
    page: Path, script: str, dark: bool = False, served_at: str = "", width: int = 1400
) -> tuple[Any, list[str]]:
    """Open a page, wait until it is drawn and run the body of an async function in it.

    Args:
      page: the file of the page.
      script: the body of the function.
      dark: whether the reader prefers dark pages.
      served_at: the address of a server of the page's folder on 127.0.0.1; "": the page is opened
        as a file.
      width: of the window, in pixels; at least 500.

    Returns:
      What it returned, and every line that the page wrote to the console.
    """
    chromium = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if chromium is None:
        pytest.skip("no Chromium here (apt-get install chromium)")
    probed = page.with_name(f"probed-{page.name}")
    probed.write_text(page.read_text().replace("</body>", _PROBE % script + "</body>"))
    address = f"{served_at}/{probed.name}" if served_at else probed.resolve().as_uri()
    result = subprocess.run(
        [
            chromium,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            f"--user-data-dir={page.parent / 'chromium'}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--window-size={width},1000",
            "--enable-logging=stderr",
            "--virtual-time-budget=60000",
            "--dump-dom",
            address,
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    console = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    found = re.search(r'<pre id="probe">(.*?)</pre>', result.stdout, re.DOTALL)
    assert found, (console, result.stderr[-2000:])
    return json.loads(html.unescape(found[1])), console
