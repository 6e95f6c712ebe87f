"""Sets of pictures: draws the missing ones with both models, embeds all of them, and measures the embeddings."""

from collections.abc import Sequence
from typing import Any

from common.storage import split
from common.targets import join_name
from evaluation.encoders import embed
from evaluation.measures import measure, nearest
from pipelines.drawing import draw_folders
from pipelines.image_folder import image_name

Sets = dict[str, list[str]]  # paths or URIs of the pictures in each set, prompt by prompt


def draw_sets(
    wanted: dict[str, tuple[str, list[str], int, dict[str, Any]]],
    seed: int,
    sampler: dict[str, Any],
    overwrite: bool,
    **pool: Any,
) -> tuple[int, Sets]:
    """Draw the missing pictures of several sets with one pool of actors; return (number of pictures drawn, the sets).

    wanted: {set: (folder, prompts, pictures per prompt, model)}, each a job of draw_folders.
    pool: batch_size, num_workers and the placement options of draw_folders.
    """
    sets = {
        name: [join_name(folder, image_name(prompt, index)) for prompt in prompts for index in range(count)]
        for name, (folder, prompts, count, _) in wanted.items()
    }
    drawn = draw_folders(list(wanted.values()), seed, sampler, overwrite, **pool)
    return sum(count for count, _ in drawn), sets


def measure_sets(
    sets: Sets,
    texts: Sequence[str],
    clip_dir: str,
    dino_dir: str | None,
    memorised_above: float,
    seed: int,
    **pool: Any,
) -> tuple[dict[str, Any], dict[str, list[tuple[str, float]]]]:
    """Return (measures, {"tuned", "base": [(name of the nearest photo, cosine similarity)] of each picture}).

    sets, memorised_above, seed: see measures.measure; texts: the prompts of "tuned" and "base", with the class name.
    pool: num_workers and the placement options of map_on_actors.
    """
    jobs = [(clip_dir, sets, texts)]
    if dino_dir:
        jobs.append((dino_dir, sets, ()))
    clip, *others = embed(jobs, **pool)
    dino = others[0] if others else None
    text_of_each = clip["texts"].repeat(len(sets["tuned"]) // len(texts), axis=0)
    measures = measure(clip, dino, text_of_each, memorised_above, seed)
    encoded, photos, found = dino or clip, sets["photos"], {}
    for name in ("tuned", "base"):
        numbers, values = nearest(encoded[name], encoded["photos"])
        found[name] = [(split(photos[i])[1], round(float(v), 4)) for i, v in zip(numbers, values, strict=True)]
    return measures, found
