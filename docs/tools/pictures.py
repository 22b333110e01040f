"""The pictures of the site, drawn from plans and figures: `python docs/tools/pictures.py` writes
docs/images/*.svg.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from maxbatch import BatchPlan, load_config

IMAGES = Path(__file__).parents[1] / "images"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCHEDULES = BENCHMARKS / "schedules.json"  # written by `python -m benchmarks.schedules`
# written by `python -m benchmarks quality --json benchmarks/quality.json`
QUALITY = BENCHMARKS / "quality.json"
LAYOUT = (("per_device_batch_size=3", "gradient_accumulation_steps=2"), 3)
RAMP = (("batch_size_schedule=0:32 768:64 1536:96 2304:128", "steps=68"), 4)
COLOURS = ("#3f51b5", "#00897b", "#ef6c00", "#8e24aa")
WIDTH = 720


def text(x: float, y: float, said: str, **style: str | int) -> str:
    """Returns a line of text; `anchor`, `size`, `fill` and `weight` style it."""
    anchor, size, fill = (
        style.get("anchor", "start"),
        style.get("size", 14),
        style.get("fill", "#263238"),
    )
    weight = f' font-weight="{style["weight"]}"' if "weight" in style else ""
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{fill}"{weight}'
    return f"<text {place}>{escape(said)}</text>"


def rectangle(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}"/>'


def line(x: float, y: float, to_x: float, to_y: float, fill: str, width: float) -> str:
    ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
    return f'<line {ends} stroke="{fill}" stroke-width="{width}"/>'


def picture(title: str, height: int, parts: Iterator[str]) -> str:
    """Returns an SVG on a white card, which is readable on light and on dark pages."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" font-family="Roboto, Helvetica, Arial, '
        f'sans-serif">\n<title>{escape(title)}</title>\n'
    )
    card = f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>\n'
    return head + card + "\n".join(parts) + "\n</svg>\n"


def plan_of(stated: tuple[tuple[str, ...], int]) -> BatchPlan:
    overrides, devices = stated
    return BatchPlan.from_config(load_config(overrides=overrides), devices)


def layout(plan: BatchPlan) -> str:
    """Draws which sample lands on which device in which micro-batch: a row per micro-batch, a box
    per sample.
    """
    batch, left, top, row = plan.global_batch_size_to_train_on, 132, 82, 58
    shards, passes = plan.batch_shards, plan.gradient_accumulation_steps
    column = (WIDTH - left - 16) / shards

    def parts() -> Iterator[str]:
        yield text(
            16, 30, f"One update: stream[s : s+{batch}], {batch} samples", size=18, weight=600
        )
        for device in range(shards):
            colour = COLOURS[device % len(COLOURS)]
            yield text(
                left + column * (device + 0.5),
                top - 12,
                f"device {device}",
                anchor="middle",
                fill=colour,
                weight=600,
            )
        for j in range(passes):
            y = top + j * row
            yield text(16, y + 27, f"micro-batch {j}", weight=600)
            for device in range(shards):
                first, end = plan.samples_of(0, j, device)
                box = (column - 12) / (end - first)
                for place, sample in enumerate(range(first, end)):
                    x = left + column * device + 6 + place * box
                    yield rectangle(x + 2, y, box - 4, 42, COLOURS[device % len(COLOURS)])
                    yield text(
                        x + box / 2, y + 26, f"S{sample + 1}", anchor="middle", fill="#ffffff"
                    )
        said = "one gradient: the sum over all samples, divided once by the tokens that count"
        yield text(WIDTH / 2, top + passes * row + 18, said, anchor="middle", fill="#546e7a")

    return picture("Which sample lands on which device", top + passes * row + 36, parts())


def ramp(plan: BatchPlan) -> str:
    """Draws the global batch of each stage against `samples_seen`."""
    left, right, top, bottom = 70, WIDTH - 24, 60, 270
    total, largest = plan.total_samples or 1, max(stage.global_batch_size for stage in plan.stages)

    def across(samples: int) -> float:
        return left + (right - left) * samples / total

    def up(batch: int) -> float:
        return bottom - (bottom - top) * batch / largest

    def parts() -> Iterator[str]:
        yield text(16, 30, "Global batch against samples_seen", size=18, weight=600)
        for number, stage in enumerate(plan.stages):
            x, end, y = (
                across(stage.first_sample),
                across(stage.first_sample + stage.num_samples),
                up(stage.global_batch_size),
            )
            yield rectangle(x + 1, y, end - x - 2, bottom - y, COLOURS[number % len(COLOURS)])
            yield text(left - 10, y + 5, str(stage.global_batch_size), anchor="end")
            yield text(
                (x + end) / 2, y + 24, f"{stage.num_steps} updates", anchor="middle", fill="#ffffff"
            )
            yield text(
                (x + end) / 2,
                y + 42,
                f"of {stage.global_batch_size}",
                anchor="middle",
                fill="#ffffff",
                size=12,
            )
            yield text(x, bottom + 20, f"{stage.first_sample:,}", anchor="middle")
        yield text(right, bottom + 20, f"{total:,}", anchor="end")
        yield text((left + right) / 2, bottom + 44, "samples_seen", anchor="middle", fill="#546e7a")

    return picture("The batch grows with samples_seen", bottom + 60, parts())


def schedules(figures: dict[str, dict[str, Any]]) -> str:
    """Draws the losses of each schedule less the constant batch's, against its updates."""
    left, right, top, bottom, margin = 90, WIDTH - 24, 60, 330, 0.01
    most = max(run["updates"] for run in figures.values())
    compared = {arm: run["less_constant"] for arm, run in figures.items() if "less_constant" in run}
    ends = [
        (one["mean"] - one["half_width"], one["mean"] + one["half_width"])
        for one in compared.values()
    ]
    shown = [
        *sum(ends, ()),
        *(each for one in compared.values() for each in one["each"]),
        margin,
        -margin,
    ]
    low, high = min(shown) - 0.002, max(shown) + 0.002

    def across(updates: float) -> float:
        return left + (right - left) * updates / most

    def up(loss: float) -> float:
        return bottom - (bottom - top) * (loss - low) / (high - low)

    def parts() -> Iterator[str]:
        yield text(
            16, 30, "Held-out loss less the constant batch's, nats per byte", size=18, weight=600
        )
        yield rectangle(left, up(margin), right - left, up(-margin) - up(margin), "#eceff1")
        for loss in (margin, 0.0, -margin):
            yield line(left, up(loss), right, up(loss), "#90a4ae", 2 if loss == 0 else 1)
            yield text(left - 10, up(loss) + 5, f"{loss:+.2f}" if loss else "0", anchor="end")
        for number, (arm, one) in enumerate(compared.items()):
            aside = 22 * (number // 2)  # of the last, which has as many updates as the second
            x, colour = across(figures[arm]["updates"]) + aside, COLOURS[number]
            yield line(
                x,
                up(one["mean"] - one["half_width"]),
                x,
                up(one["mean"] + one["half_width"]),
                colour,
                3,
            )
            yield line(x - 9, up(one["mean"]), x + 9, up(one["mean"]), colour, 3)
            for each in one["each"]:
                yield (
                    f'<circle cx="{x - 14:.1f}" cy="{up(each):.1f}" r="3.5" fill="{colour}" '
                    'fill-opacity="0.6"/>'
                )
            yield text(x + 14, up(one["mean"]) + (20, 20, -8)[number], arm, fill=colour, weight=600)
        for updates in range(0, most + 1, 1000):
            yield text(across(updates), bottom + 20, f"{updates:,}", anchor="middle")
        said = (
            f"updates (the constant batch has {most:,}); points: seeds; lines: mean, 95% "
            "interval; grey: margin"
        )
        yield text((left + right) / 2, bottom + 44, said, anchor="middle", fill="#546e7a", size=13)

    return picture(
        "Loss of three schedules of the batch against a constant one", bottom + 60, parts()
    )


def quality(measured: list[dict[str, Any]]) -> str:
    """Draws the held-out loss of each preset in float32 and in 8 bits, in percent of bfloat16's."""
    losses: dict[str, dict[str, float]] = {}
    for one in measured:
        preset, _, what = one["name"].partition(": ")
        kind = what.partition(" over ")[0] if " over " in what else what.rpartition(", ")[2]
        losses.setdefault(preset, {})[kind] = one["detail"]["loss"]
    left, right, top, bottom, most, margin = 70, WIDTH - 24, 60, 300, 3.0, 1.0
    column = (right - left) / len(losses)

    def up(percent: float) -> float:
        return (top + bottom) / 2 - (bottom - top) / 2 * percent / most

    def parts() -> Iterator[str]:
        yield text(
            16, 30, "Held-out loss more or less than bfloat16's, percent", size=18, weight=600
        )
        yield rectangle(left, up(margin), right - left, up(-margin) - up(margin), "#eceff1")
        for percent in (2.0, margin, 0.0, -margin, -2.0):
            yield line(left, up(percent), right, up(percent), "#90a4ae", 2 if percent == 0 else 1)
            yield text(
                left - 10, up(percent) + 5, f"{percent:+.0f}" if percent else "0", anchor="end"
            )
        for place, (preset, found) in enumerate(losses.items()):
            middle = left + column * (place + 0.5)
            for number, kind in enumerate(("float32", "int8", "fp8")):
                x, percent = middle + (number - 1) * 44, 100 * (found[kind] / found["bfloat16"] - 1)
                yield f'<circle cx="{x:.1f}" cy="{up(percent):.1f}" r="6" fill="{COLOURS[number]}"/>'
                yield text(
                    x, up(percent) - 10, kind, anchor="middle", fill=COLOURS[number], size=12
                )
            yield text(middle, bottom + 22, preset, anchor="middle", weight=600)
        said = "one run each; grey: 1%"
        yield text((left + right) / 2, bottom + 46, said, anchor="middle", fill="#546e7a", size=13)

    return picture("Held-out loss in float32 and in 8 bits beside bfloat16", bottom + 62, parts())


def pictures() -> dict[str, str]:
    """Returns the SVG of each file of docs/images/."""
    return {
        "layout.svg": layout(plan_of(LAYOUT)),
        "ramp.svg": ramp(plan_of(RAMP)),
        "schedules.svg": schedules(json.loads(SCHEDULES.read_text(encoding="utf-8"))),
        "quality.svg": quality(
            json.loads(QUALITY.read_text(encoding="utf-8"))["benchmarks"]["quality"]
        ),
    }


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name, svg in pictures().items():
        (IMAGES / name).write_text(svg, encoding="utf-8")
