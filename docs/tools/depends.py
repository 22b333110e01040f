"""Writes the table of keys in docs/depends.md, from config/sections.py."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from maxbatch.config.keys import Fixes, Key, Shared
from maxbatch.config.pins import is_pinned
from maxbatch.config.sections import KEYS

PAGE = Path(__file__).parents[1] / "depends.md"
BEGIN, END = "<!-- keys: begin -->\n", "<!-- keys: end -->\n"
_HOSTS = {
    Shared.VALUE: "the value",
    Shared.CONTENT: "the content, in any place",
    Shared.STATED: "whether it is set",
    Shared.NOTHING: "nothing; each host may have its own",
}


def resumed(key: Key) -> str:
    """Returns the effect of a resume with another value of a key."""
    what = key.changes
    if key.name in ("load_parameters_path", "load_full_state_path"):
        return (
            f"changes {what}; refused if the run reads its starting point again and finds other "
            "content"
        )
    if key.name == "skip_samples":
        return f"changes {what}; refused if those behind the position change"
    if is_pinned(key):
        return "refused"
    if key.fixes & (Fixes.RECORDS | Fixes.CONTENT) and not what:
        return "refused if the content differs"
    return f"changes {what}" if what else "no effect"


def table() -> str:
    """Returns a row for each group of keys that hosts and resumes treat alike."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for key in KEYS.values():
        groups[_HOSTS[key.shared], resumed(key)].append(key.name)
    lines = ["| keys | hosts must share | a resume with another value |\n", "|---|---|---|\n"]
    lines += [
        f"| {', '.join(f'`{name}`' for name in names)} | {a} | {b} |\n"
        for (a, b), names in groups.items()
    ]
    return "".join(lines)


def page() -> str:
    """Returns the page with a new table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
