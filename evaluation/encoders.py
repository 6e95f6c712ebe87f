"""CLIP and DINO encoders, in transformers' format: finds them on disk or on the Hugging Face Hub, and runs them."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.actors import map_on_actors
from common.cluster import start_ray
from common.errors import BadInput, CheckFailed, TryAgain
from common.folders import MANIFEST, SHA256, digest_files, read_manifest
from common.images import read_image_at
from common.messages import Progress
from common.no_gc import no_gc
from common.objects import local_copy
from common.storage import is_remote
from evaluation.sending import Sent, send
from pipelines.configs import Config, read_json_file
from pipelines.loading import set_up_torch
from pipelines.model_folder import check_safetensors
from pipelines.tokens import check_vocabulary, find_vocabulary

if TYPE_CHECKING:
    import torch

FILES = ("*.json", "*.txt", "*.safetensors")
ENCODE_BATCH = 16  # pictures or texts
CONVERTER = "SFconvertbot"  # the Hub's bot, whose pull requests add safetensors to repositories of pickle files
TIMEOUT = 10  # seconds to wait for the Hub
DINO_MEAN, DINO_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


# ---------------------------------------------------------------------------------------------------------------------
# Finding


def find_encoder(name: str, flag: str) -> str:
    """Return the folder of an encoder: `name` is a folder, a URI, or a repository in the Hub cache or on the Hub.

    flag: the flag that gave the name. Raises BadInput if there is no such encoder or it has no safetensors, CheckFailed
    if its weights are damaged, TryAgain if the Hub cannot be reached.
    """
    folder = local_copy(name) if is_remote(name) else Path(name).expanduser()
    if not folder.is_dir():
        if name.startswith(("/", ".", "~")) or name.count("/") != 1:
            raise BadInput(f"{flag} {name} is neither a folder nor ORGANISATION/NAME on the Hugging Face Hub: check it")
        folder = find_cached(name) or fetch(name, flag)
    check_encoder(folder, flag)
    return str(folder.resolve())


def check_encoder(folder: Path, flag: str) -> None:
    """Raise BadInput or CheckFailed unless `folder` holds a transformers model in undamaged safetensors."""
    model_type = read_model_type(folder)
    if model_type is None:
        raise BadInput(f"{flag} {folder} has no config.json of a transformers model: choose another folder")
    if flag == "--clip_model" and model_type != "clip":
        raise BadInput(f"{flag} {folder} holds a {model_type} model: choose a CLIP model")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise BadInput(f"{flag} {folder} holds no safetensors: choose another model")
    for path in weights:
        check_safetensors(path)
    if model_type == "clip":
        texts = read_json_file(folder / "config.json").get("text_config") or {}
        check_vocabulary(folder, Config(texts, "transformers", "CLIPTextModel")["vocab_size"])


def read_model_type(folder: str | Path) -> str | None:
    """Return the model_type in a folder's config.json, such as "clip", or None."""
    path = Path(folder) / "config.json"
    return read_json_file(path).get("model_type") if path.is_file() else None


def find_cached(name: str) -> Path | None:
    """Return the folder of a complete snapshot in the Hub cache, preferably that of `main`, or None.

    Snapshots can be incomplete: CLIPModel.from_pretrained alone does not download the tokenizer.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    repository = Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    main = repository / "refs" / "main"
    first = main.read_text().strip() if main.is_file() else ""
    snapshots = sorted(repository.glob("snapshots/*"), key=lambda path: (path.name != first, path.name))
    return next(filter(_has_all_files, snapshots), None)


def _has_all_files(snapshot):
    model_type = read_model_type(snapshot)
    with contextlib.suppress(BadInput):
        if model_type == "clip":
            find_vocabulary(snapshot)
        return model_type is not None and any(snapshot.glob(FILES[-1]))
    return False


def fetch(name: str, flag: str) -> Path:
    """Download the configuration and safetensors of an encoder to the Hub cache and return its folder.

    If its main branch has no safetensors, as with CLIP and DINO, the pull request of CONVERTER is used.
    """
    import httpx2
    from huggingface_hub import HfApi, errors
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi()
    remedy = "run this once on a machine with network and copy its Hub cache (HF_HOME), or give a local folder"
    try:
        files = [file.rfilename for file in api.model_info(name, timeout=TIMEOUT).siblings or []]
        revision = "main" if fnmatch.filter(files, FILES[-1]) else _converted(api, name, flag)
        return Path(api.snapshot_download(name, revision=revision, allow_patterns=list(FILES)))
    except errors.RepositoryNotFoundError as error:
        raise BadInput(f"{flag} {name} is neither a folder nor a model on {api.endpoint}: check it") from error
    except (httpx2.TransportError, errors.HfHubHTTPError, OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise TryAgain(
            f"{flag} {name} is not in the Hub cache, and {api.endpoint} cannot be reached: {remedy}"
        ) from error


def _converted(api, name, flag):
    requests = api.get_repo_discussions(
        name, author=CONVERTER, discussion_type="pull_request", discussion_status="open"
    )
    found = next((request.git_reference for request in requests), None)
    if found is None:
        raise BadInput(f"{flag} {name} holds only pickle files, which can run code: choose a model with safetensors")
    return found


def digest_encoder(folder: str | Path) -> str:
    """Return one sha256 of an encoder's files; hashes in a manifest or in the Hub cache are not computed again."""
    folder = Path(folder)
    facts = (read_manifest(folder) or {"files": {}})["files"]
    known, paths = {}, _files(folder)
    for path in paths:
        blob = os.path.basename(os.path.realpath(path))
        if path.name in facts:
            known[path] = facts[path.name]["sha256"]
        elif SHA256.fullmatch(blob):
            known[path] = blob
    return digest_files(paths, known=known)


def _files(folder: Path) -> list[Path]:
    return [path for pattern in FILES for path in folder.glob(pattern) if path.name != MANIFEST]


# ---------------------------------------------------------------------------------------------------------------------
# Encoding


class Encoder:
    """Embeds pictures, and with CLIP also texts, always in float32 so that results are comparable."""

    def __init__(self, model_dir: str | Path, num_threads: int | None = None) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer, CLIPModel

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        set_up_torch(self.device, num_threads, mixed_precision="no")
        self.is_clip = read_json_file(Path(model_dir) / "config.json")["model_type"] == "clip"
        model, info = (CLIPModel if self.is_clip else AutoModel).from_pretrained(
            model_dir,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
        missing = sorted(key for key in info["missing_keys"] if not key.startswith("pooler."))  # unused; DINO has none
        if missing:
            raise CheckFailed(f"{model_dir}: {len(missing)} weights are missing, first {missing[0]}: download it again")
        self.model = model.to(self.device).eval()
        self.processor = load_processor(model_dir, self.is_clip, self.model.config)
        if self.is_clip:
            self.tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        """Return {"name", "start", "embeds": [B, D] float32} of an item {"name", "start", "paths" or "texts"}."""
        import torch

        with torch.inference_mode():
            embeds = self._texts(item["texts"]) if "texts" in item else self._pictures(item["paths"])
        return {"name": item["name"], "start": item["start"], "embeds": embeds.float().cpu().numpy()}

    def _pictures(self, paths: list[str]) -> torch.Tensor:
        pixel_values = self.processor([read_image_at(path) for path in paths], return_tensors="pt")["pixel_values"]
        pixel_values = pixel_values.to(self.device)  # B 3 H W
        if not self.is_clip:
            return self.model(pixel_values).last_hidden_state[:, 0]  # B D: the class token
        return self.model.visual_projection(self.model.vision_model(pixel_values=pixel_values).pooler_output)

    def _texts(self, texts: list[str]) -> torch.Tensor:
        length = self.model.config.text_config.max_position_embeddings
        batch = self.tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
        output = self.model.text_model(batch.input_ids.to(self.device), batch.attention_mask.to(self.device))
        return self.model.text_projection(output.pooler_output)  # B D


def load_processor(model_dir: str | Path, is_clip: bool, config: Any) -> Any:
    """Return the image processor of a model, or one with the usual mean and std of CLIP or DINO if it has none."""
    from transformers import AutoImageProcessor, CLIPImageProcessorPil

    if (Path(model_dir) / "preprocessor_config.json").is_file():
        return AutoImageProcessor.from_pretrained(model_dir, local_files_only=True, backend="pil")
    side = config.vision_config.image_size if is_clip else config.image_size
    usual = {} if is_clip else {"image_mean": DINO_MEAN, "image_std": DINO_STD}
    return CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side}, **usual)


class Encoders:
    """Embeds with several encoders, each loaded at its first item and kept; runs in an actor.

    sent: {folder: the files} of those whose folder is on the driver's node.
    """

    def __init__(self, num_threads: int | None = None, sent: dict[str, Sent] | None = None) -> None:
        self.num_threads, self.sent = num_threads, sent or {}
        self.encoders: dict[str, Encoder] = {}

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        """Return the embeddings of an item by the encoder in the folder item["encoder"], with the item's "job"."""
        folder = item["encoder"]
        if folder not in self.encoders:
            here = str(self.sent[folder].receive()) if folder in self.sent else folder
            with no_gc():
                self.encoders[folder] = Encoder(here, self.num_threads)
        return {"job": item["job"], **self.encoders[folder](item)}


def send_to_cluster(encoders: Iterable[str], pool: dict[str, Any]) -> dict[str, Sent]:
    """Return {folder: what was sent} of encoders if a pool is on a cluster, whose nodes lack the driver's folders."""
    if pool["num_workers"] == 0 or start_ray(pool.get("address"), pool.get("insecure_cluster", False)).is_local:
        return {}
    return {folder: send(_files(Path(folder)), digest_encoder(folder)) for folder in dict.fromkeys(encoders)}


def embed(
    jobs: Sequence[tuple[str, Mapping[str, Sequence[str | Path]], Sequence[str]]], **pool: Any
) -> list[dict[str, np.ndarray]]:
    """Run several encoders on one pool of actors; return {name: embeddings [N, D] float32} for each job.

    jobs: (folder of an encoder, {name: paths or URIs of pictures}, texts) each; texts are embedded as "texts".
    pool: num_workers and the placement options of map_on_actors.
    Raises CheckFailed if an embedding is not finite.
    """
    items = [
        {"job": job, "encoder": folder, "name": name, "start": start}
        | {kind: [str(each) for each in contents[start : start + ENCODE_BATCH]]}
        for job, (folder, sets, texts) in enumerate(jobs)
        for kind, named in (("paths", sets), ("texts", {"texts": list(texts)}))
        for name, contents in named.items()
        for start in range(0, len(contents), ENCODE_BATCH)
    ]
    found: list[dict[tuple[str, int], np.ndarray]] = [{} for _ in jobs]
    total = sum(sum(map(len, sets.values())) + len(texts) for _, sets, texts in jobs)
    sent = send_to_cluster((folder for folder, _, _ in jobs), pool)
    with Progress("embed", total, "images and prompts") as progress:
        for result in map_on_actors(Encoders, {"sent": sent}, items, **pool):
            found[result["job"]][result["name"], result["start"]] = result["embeds"]
            progress.update(len(result["embeds"]))
    return [_join(folder, parts) for (folder, _, _), parts in zip(jobs, found, strict=True)]


def _join(folder, found):
    """Return {name: embeddings [N, D]}, joined from {(name, start): a part of them}."""
    embeds: dict[str, list[np.ndarray]] = {}
    for name, start in sorted(found):
        if not np.isfinite(found[name, start]).all():
            raise CheckFailed(f"{folder} gives embeddings of {name} that are not finite: download it again")
        embeds.setdefault(name, []).append(found[name, start])
    return {name: np.concatenate(parts) for name, parts in embeds.items()}
