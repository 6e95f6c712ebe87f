"""The report of an evaluation: a single HTML page that needs no other file, no script and no network."""

from __future__ import annotations

import base64
import io
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.folders import SHA256, read_json_lines
from common.images import read_image_at
from common.storage import split
from evaluation.measures import MEASURES, Estimate, are_apart
from pipelines.model_folder import TRAINING_LOG, VALIDATION_STRIP

TEMPLATE = "report.html.jinja"
SIDES = ((120, 256), (400, 160), (None, 96))  # (most pictures on the page, longer side of each in pixels)
SHOWN_PHOTOS, SHOWN_CLASS_IMAGES, SHOWN_CLOSEST = 24, 24, 12
STRIP_SIDE = 1400  # pixels, of the longer side
QUALITY = 80  # of WebP
SMOOTHED = 10  # the loss is smoothed over a tenth of the logged steps
FAINT, DARK = "#a9b8cf", "#1d4f91"


def make_report(
    evaluation: dict[str, Any],
    sets: dict[str, list[str]],
    tuned_dir: str | Path,
    models: dict[str, str],
    command: Sequence[str],
) -> str:
    """Return the report.html of an evaluation.

    evaluation: the contents of evaluation.json; sets: paths or URIs of the pictures in each set, prompt by prompt;
    tuned_dir: folder of the tuned model on this node; models: names of "tuned" and "base"; command: the words of the
    command line.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    shown = {name: value for name, value in sorted(evaluation["settings"].items()) if value not in (None, "")}
    here = Path(__file__).resolve().parent
    options = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    template = Environment(loader=FileSystemLoader(here), **options).get_template(TEMPLATE)
    return template.render(
        details=evaluation["details"],
        rows=measure_rows(evaluation["measures"]),
        encoders=evaluation["encoders"],
        memorised_above=evaluation["settings"]["memorised_above"],
        models=models,
        settings={name: shorten(value) for name, value in shown.items()},
        command=format_command(command),
        plot=plot_training(read_json_lines(Path(tuned_dir, TRAINING_LOG))),
        strip=show_strip(Path(tuned_dir, VALIDATION_STRIP)),
        **show_pictures(evaluation["details"], sets),
    )


def shorten(value: Any) -> str:
    """Return a setting as text; a sha256 is cut."""
    text = str(value)
    return f"sha256 {text[:12]}…" if SHA256.fullmatch(text) else text


def format_command(words: Sequence[str]) -> str:
    """Return a command line quoted for a shell, with one flag per line."""
    return "".join(
        f" \\\n  {word}" if word.startswith("--") else f" {word}" for word in map(shlex.quote, words)
    ).strip()


def measure_rows(measures: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the table of measures; "tuned" is None if a measure was not taken."""
    rows = []
    for name, about in ((name, about) for name, about in MEASURES.items() if name in measures):
        found = measures[name] or {}
        tuned, base, photos = (format_estimate(found.get(column)) for column in ("tuned", "base", "photos"))
        change = found and describe_change(found["tuned"], found["base"])
        row = {"name": name, "about": about, "tuned": tuned, "base": base, "photos": photos, "change": change}
        subjects = {other: format_estimate({"value": value}) for other, value in found.get("subjects", {}).items()}
        rows.append({**row, "subjects": subjects})
    return rows


def format_estimate(estimate: Estimate | None) -> dict[str, str] | None:
    """Return {"value", "interval"} as text, with interval "" if there is none; None for no estimate."""
    if estimate is None:
        return None
    number = {name: f"{value:.3f}".replace("-", "\N{MINUS SIGN}") for name, value in estimate.items()}
    return {"value": number["value"], "interval": f"{number['low']} to {number['high']}" if "low" in number else ""}


def describe_change(tuned: Estimate, base: Estimate) -> str:
    """Return in words how the tuned model's estimate compares with the base model's."""
    if not are_apart(tuned, base):
        return "no clear change"
    return "higher than before" if tuned["value"] > base["value"] else "lower than before"


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


def show_pictures(details: dict[str, Any], sets: dict[str, list[str]]) -> dict[str, Any]:
    """Return the pictures on the page, as from `show`: {"photos", "prompts", "classes", "closest"}."""
    nearest = details["nearest"]["tuned"]
    closest = sorted(range(len(nearest)), key=lambda i: (-nearest[i][1], i))[:SHOWN_CLOSEST]
    photos = sets["photos"][:SHOWN_PHOTOS]
    named = [(path, split(path)[1]) for path in photos]
    classes = {name: sets[f"class_{name}"][:SHOWN_CLASS_IMAGES] for name in ("base", "tuned")}
    count = len(photos) + 2 * len(sets["tuned"]) + sum(map(len, classes.values())) + 2 * len(closest)
    side = next(side for most, side in SIDES if most is None or count <= most)
    by_name = {split(path)[1]: path for path in sets["photos"]}
    return {
        "photos": [show(path, f"Photo of the subject, {name}", side, name=name) for path, name in named],
        "prompts": show_prompts(details, sets, side),
        "classes": {
            model: [show(path, f"Class image {i} of the {model} model", side) for i, path in enumerate(paths, 1)]
            for model, paths in classes.items()
        },
        "closest": [
            {
                "picture": show(sets["tuned"][i], "Image of the tuned model", side),
                "photo": show(by_name[nearest[i][0]], f"Its nearest photo, {nearest[i][0]}", side),
                "name": nearest[i][0],
                "likeness": nearest[i][1],
            }
            for i in closest
        ],
    }


def show_prompts(details: dict[str, Any], sets: dict[str, list[str]], side: int) -> list[dict[str, Any]]:
    """Return {"text", "base": pictures, "tuned": pictures} of each prompt, with the nearest photo of each picture."""
    prompts = details["prompts"]
    per_prompt = len(sets["tuned"]) // len(prompts)
    shown = [{"text": prompt, "base": [], "tuned": []} for prompt in prompts]
    for model in ("base", "tuned"):
        for i, path in enumerate(sets[model]):
            number, sample = divmod(i, per_prompt)
            photo, likeness = details["nearest"][model][i]
            alt = f"Sample {sample + 1} of the {model} model: {prompts[number]}"
            shown[number][model].append(show(path, alt, side, photo=photo, likeness=likeness))
    return shown


def show(path: str | Path, alt: str, side: int, **more: Any) -> dict[str, Any]:
    """Return {"uri", "alt", **more} of a picture, scaled to at most `side` pixels, as WebP."""
    image = read_image_at(path)
    image.thumbnail((side, side))
    data = io.BytesIO()
    image.save(data, "WEBP", quality=QUALITY)
    return {"uri": data_uri(data.getvalue(), "webp"), "alt": alt, **more}


def data_uri(data: bytes, kind: str) -> str:
    """Return the bytes of an image as a data URI; kind: the image's media subtype."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


# ---------------------------------------------------------------------------------------------------------------------
# Training


def smooth(values: Sequence[float]) -> list[float]:
    """Return the bias-corrected exponential moving average of values, over a tenth of them but at least five."""
    weight = 1 - 2 / (max(5, len(values) / SMOOTHED) + 1)
    sums = np.zeros(2)
    smoothed = []
    for value in values:
        sums = weight * sums + (value, 1)
        smoothed.append(sums[0] / sums[1])
    return smoothed


def show_strip(path: Path) -> dict[str, Any] | None:
    """Return the validation images of train.py --validation_prompts, as from `show`, or None if there are none."""
    if not path.is_file():
        return None
    return show(path, "Validation images of the same prompts and seeds, a row for each step", STRIP_SIDE)


def plot_training(log: list[dict[str, Any]]) -> dict[str, str] | None:
    """Return {"uri", "alt"} of an SVG plot of the losses and gradient norms in a log, or None if it has none."""
    lines = [line for line in log if line.get("loss") is not None and line.get("grad_norm") is not None]
    if not lines:
        return None
    import matplotlib
    from matplotlib.figure import Figure

    steps, losses, norms = ([line[name] for line in lines] for name in ("step", "loss", "grad_norm"))
    data = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "report", "font.size": 9}):
        figure = Figure(figsize=(6.4, 4), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True)
        for axes, name, values in ((upper, "loss", losses), (lower, "gradient norm", norms)):
            axes.plot(steps, values, color=FAINT, linewidth=1, marker=".", markersize=3, label="logged")
            axes.plot(steps, smooth(values), color=DARK, linewidth=1.8, label="smoothed")
            axes.set_ylabel(name)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        lower.set_xlabel("step")
        upper.legend(frameon=False)
        figure.savefig(data, format="svg", metadata={"Date": None})
    alt = f"Loss and gradient norm over {steps[-1]} steps; the smoothed loss ends at {smooth(losses)[-1]:.3g}"
    return {"uri": data_uri(data.getvalue(), "svg+xml"), "alt": alt}
