"""Train the CLIP and the tokenizer of the embedded model: 64x64 pixels, 32 tokens, 1.8 million weights.

Trains on captioned emoji in three styles on ten background colours. To resume, run the same command again.
OUTPUT_DIR/clip is a complete CLIPModel; text_encoder and tokenizer beside it are the parts that the pipeline uses.

    python -m recipes.emoji.train_clip --output_dir data/emoji/clip --max_train_steps 5
    python -m recipes.emoji.train_clip --output_dir data/emoji/clip
"""

import json
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np

from common import cli, errors, folders, messages
from common.images import to_pixel_values
from recipes.emoji import pictures
from recipes.emoji.pictures import BACKGROUNDS, STYLES
from training import checkpoints
from training.logs import StepLog
from training.optimizer import Optimizer
from utils import row_rng

VOCAB_SIZE = 2500
MAX_TOKENS = 32  # per prompt
BOS, EOS = "<|startoftext|>", "<|endoftext|>"
TWIN_SHARE = 1 / 4  # share of a batch that repeats its other pictures on different backgrounds
RARE_TAG = 3  # largest number of emoji that share a tag for it to be used as a name
STATED = {"style": 0.75, "name": 0.92, "background": 0.7}  # how often a caption states each part
OTHER_WORD = 0.3  # share of names that are replaced by a rare tag
HELD_OUT_SHARE = 0.1
NUM_PATCHES, KEPT_SHARE = 64, 0.5  # training sees half of the patches, in half the time (arXiv 2212.00794)
NUM_CHOICES = 16  # names to choose from in the retrieval accuracy
BATCH, ROW, PATCHES, HELD_OUT, MEASURE = range(110, 115)  # streams of random numbers


def parse_args(argv=None):
    """Parse the command line."""
    parser = cli.make_parser(__doc__)
    parser.add_argument("--cache_dir", default="data/emoji", help="folder of the downloaded archives")
    parser.add_argument("--output_dir", required=True, help="folder for the result; checkpoints go to OUTPUT_DIR.work")
    parser.add_argument("--max_train_steps", type=cli.positive_int, default=2000, help="optimizer steps")
    parser.add_argument("--train_batch_size", type=cli.positive_int, default=128, help="pictures and captions per step")
    parser.add_argument("--lr", type=cli.positive_float, default=1e-3, help="peak learning rate of the cosine schedule")
    parser.add_argument("--checkpointing_steps", type=cli.positive_int, default=100, help="steps between checkpoints")
    parser.add_argument("--seed", type=cli.seed, default=0, help="seed of weights, pictures, captions and held-out set")
    cli.add_shared_flags(parser)
    return parser.parse_args(argv)


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer and model


def corpus(emoji):
    """Return the texts that the tokenizer is trained on."""
    texts = []
    for picture in emoji:
        words = (picture.name, picture.label, *picture.tags, *filter(None, [pictures.ALSO.get(picture.name)]))
        texts += words
        texts += [pictures.caption(STYLES[picture.style], words[0], background) for background in BACKGROUNDS]
    return texts


def train_tokenizer(texts):
    """Return a CLIPTokenizer of about VOCAB_SIZE tokens: lowercase byte-level BPE, with a token for every byte."""
    from tokenizers import trainers
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    letters = sorted(ByteLevel.alphabet())
    ends = [f"{letter}</w>" for letter in letters]
    trained = CLIPTokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 2,
        initial_alphabet=letters,
        special_tokens=ends,  # else their numbers follow a hash table, and merges differ between runs
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    merges = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    tokens = dict.fromkeys([*letters, *ends, *map("".join, merges), BOS, EOS])
    vocab = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=MAX_TOKENS)


def make_clip(tokenizer):
    """Return a CLIP with random weights for 64x64 pixels and the vocabulary of the tokenizer."""
    from transformers import CLIPConfig, CLIPModel

    size = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "projection_dim": 128}
    text_config = {
        **size,
        "num_hidden_layers": 3,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": MAX_TOKENS,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision_config = {**size, "num_hidden_layers": 4, "image_size": 64, "patch_size": 8, "hidden_act": "gelu"}
    return CLIPModel(CLIPConfig(text_config=text_config, vision_config=vision_config, projection_dim=128))


def embed_images(clip, pixel_values, kept=None):
    """Return the embeddings [B, 128], at unit length, of pictures [B, 3, 64, 64] in [-1, 1].

    kept: [B, K] numbers of the patches to look at, all where it is None.
    """
    import torch

    vision = clip.vision_model
    hidden_states = vision.embeddings(pixel_values)  # B, 1 + patches, 128: the class token first
    if kept is not None:
        index = (kept + 1)[..., None].expand(-1, -1, hidden_states.shape[-1])
        hidden_states = torch.cat([hidden_states[:, :1], hidden_states.gather(1, index)], dim=1)
    hidden_states = vision.encoder(inputs_embeds=vision.pre_layrnorm(hidden_states)).last_hidden_state
    return normalized(clip.visual_projection(vision.post_layernorm(hidden_states[:, 0])))


def embed_texts(clip, tokenizer, texts):
    """Return the embeddings [B, 128], at unit length, of captions, taken at the end token."""
    batch = tokenizer(texts, padding="longest", max_length=MAX_TOKENS, truncation=True, return_tensors="pt")
    return normalized(clip.text_projection(clip.text_model(input_ids=batch.input_ids).pooler_output))


def normalized(vectors):
    """Return vectors [B, D] scaled to unit length."""
    return vectors / vectors.norm(dim=-1, keepdim=True)


# ---------------------------------------------------------------------------------------------------------------------
# Batches


def split_pictures(emoji, seed):
    """Return (training pictures, held-out pictures); a random share of the styles other than 3d is held out."""
    others = [index for index, picture in enumerate(emoji) if STYLES[picture.style] != "3d"]
    order = row_rng(seed, HELD_OUT, 0, 0).permutation(others)
    held_out = set(order[: int(HELD_OUT_SHARE * len(others))].tolist())
    return [emoji[i] for i in range(len(emoji)) if i not in held_out], [emoji[i] for i in sorted(held_out)]


def words_of(picture):
    """Return all names of a picture."""
    return {picture.name, pictures.ALSO.get(picture.name, picture.name), *picture.tags}


class Batches:
    """Pictures and captions by (seed, step, row). All emoji in a batch differ, except for the twins.

    A twin is a picture that the batch holds already, on another background: colours must be told apart.
    """

    def __init__(self, emoji, seed):
        self.seed, self.concepts = seed, {}
        for picture in emoji:
            self.concepts.setdefault(picture.hexcode, []).append(picture)
        self.counts = Counter(tag for group in self.concepts.values() for tag in group[0].tags)

    def batch(self, step, size):
        """Return (pixels, patches to keep, captions, matches) of a step.

        [B, 3, 64, 64] in [-1, 1]; [B, K] patch numbers; B strings; [B, B], whether caption i fits picture j.
        """
        import torch

        rows = [self._row(step, row, *picked) for row, picked in enumerate(self._pick(step, size))]
        shown = [(picture.style, words_of(picture), background) for picture, background, _, _ in rows]
        matches = [[fits(stated, each) for each in shown] for _, _, stated, _ in rows]
        texts = [pictures.caption(style and STYLES[style], *rest) for _, _, (style, *rest), _ in rows]
        order = row_rng(self.seed, PATCHES, step, 0).random((size, NUM_PATCHES)).argsort(axis=1)
        kept = torch.from_numpy(order[:, : int(NUM_PATCHES * KEPT_SHARE)].copy())
        return torch.from_numpy(np.stack([values for *_, values in rows])), kept, texts, torch.tensor(matches)

    def _pick(self, step, size):
        """Return the (picture, background) of each row, with the twins last."""
        rng = row_rng(self.seed, BATCH, step, 0)
        groups, names = list(self.concepts.values()), list(BACKGROUNDS)
        num_twins = int(size * TWIN_SHARE)
        if size - num_twins > len(groups):
            raise errors.BadInput(f"--train_batch_size {size} is more than the {len(groups)} emoji and their twins")
        picked = []
        for index in rng.permutation(len(groups))[: size - num_twins]:
            group = groups[index]
            picked.append((group[rng.integers(len(group))], int(rng.integers(len(names)))))
        picked += [(picture, place + int(rng.integers(1, len(names)))) for picture, place in picked[:num_twins]]
        return [(picture, names[place % len(names)]) for picture, place in picked]

    def _row(self, step, row, picture, background):
        """Return (picture, background, what the caption states, pixels)."""
        rng = row_rng(self.seed, ROW, step, row)
        has = {part: rng.random() < share for part, share in STATED.items()}
        if not any(has.values()):
            has["name"] = True
        word = self._word(picture, rng)
        stated = tuple(
            part if has[name] else None for name, part in zip(STATED, (picture.style, word, background), strict=True)
        )
        return picture, background, stated, draw(picture, rng, background)

    def _word(self, picture, rng):
        """Return the name of a picture, or sometimes another word for it."""
        others = sorted(tag for tag in words_of(picture) - {picture.name} if self.counts[tag] <= RARE_TAG)
        return others[rng.integers(len(others))] if others and rng.random() < OTHER_WORD else picture.name


def draw(picture, rng, background):
    """Return a picture on approximately the background's colour, [3, 64, 64] float32 in [-1, 1]."""
    colour = np.clip(BACKGROUNDS[background] + rng.integers(-8, 9, size=3), 0, 255)
    return to_pixel_values(pictures.compose(picture, rng, tuple(int(c) for c in colour)), 64)


def fits(stated, shown):
    """Return whether a caption's (style, word, background), with None for unstated parts, fits a picture.

    shown: (style, all words for it, background).
    """
    style, word, background = stated
    return style in (None, shown[0]) and (word is None or word in shown[1]) and background in (None, shown[2])


def contrastive_loss(logits, matches):
    """Return (loss, accuracy): CLIP's loss with equal targets for all that fit, and how often the best match fits.

    logits: [B, B] of captions and pictures; matches: [B, B] bool, whether caption i fits picture j.
    """
    from torch.nn.functional import cross_entropy

    losses = []
    for scores, right in ((logits, matches), (logits.T, matches.T)):
        losses.append(cross_entropy(scores, right / right.sum(dim=1, keepdim=True)))
    accuracy = matches.gather(1, logits.argmax(dim=1, keepdim=True)).float().mean()
    return sum(losses) / 2, accuracy


# ---------------------------------------------------------------------------------------------------------------------
# Measuring and saving


def measure(clip, tokenizer, emoji, held_out, seed):
    """Return the retrieval accuracy on held-out pictures, among NUM_CHOICES names and among the backgrounds."""
    import torch

    names = sorted({picture.name for picture in emoji})
    right = Counter()
    for index, picture in enumerate(held_out):
        rng = row_rng(seed, MEASURE, 0, index)
        style, colours = STYLES[picture.style], list(rng.permutation(list(BACKGROUNDS)))
        others = [name for name in rng.permutation(names)[:NUM_CHOICES] if name != picture.name][: NUM_CHOICES - 1]
        texts = [pictures.caption(style, name) for name in (picture.name, *others)]
        texts += [pictures.caption(style, picture.name, colour) for colour in colours]
        with torch.inference_mode():
            image = embed_images(clip, torch.from_numpy(draw(picture, rng, colours[0]))[None])
            scores = (embed_texts(clip, tokenizer, texts) @ image[0]).numpy()
        right["retrieval"] += int(scores[:NUM_CHOICES].argmax() == 0)
        right["background"] += int(scores[NUM_CHOICES:].argmax() == 0)
    return {f"{name}_accuracy": round(right[name] / len(held_out), 4) for name in ("retrieval", "background")}


def save_models(clip, tokenizer, folder):
    """Write clip/, text_encoder/ and tokenizer/ in float16."""
    from transformers import CLIPImageProcessor

    processor = CLIPImageProcessor(size={"shortest_edge": 64}, crop_size=64, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    clip = clip.half()
    clip.save_pretrained(folder / "clip")
    tokenizer.save_pretrained(folder / "clip")
    processor.save_pretrained(folder / "clip")
    clip.text_model.save_pretrained(folder / "text_encoder")
    tokenizer.save_pretrained(folder / "tokenizer")


def train(clip, tokenizer, batches, args, work_dir):
    """Train from the newest checkpoint to the last step and return the CLIP."""
    import torch

    step, folder = checkpoints.newest_checkpoint(work_dir)
    if folder:
        clip = type(clip).from_pretrained(folder / "clip")
    clip.train()
    schedule = ("cosine", 50, args.max_train_steps)
    optimizer = Optimizer([(clip.parameters(), args.lr)], 0.05, 1.0, False, torch.device("cpu"), schedule)
    if folder:
        checkpoints.restore_optimizer(folder, {"clip": clip}, optimizer.adamw)
    write = partial(checkpoints.write_state, modules={"clip": clip}, optimizer=optimizer.adamw)
    log, mean_loss, mean_accuracy = StepLog(work_dir, step), None, None
    with messages.Progress("clip", args.max_train_steps, "steps", initial=step) as progress:
        while step < args.max_train_steps:
            pixel_values, kept, texts, matches = batches.batch(step, args.train_batch_size)
            scale = clip.logit_scale.clamp(max=np.log(100)).exp()
            logits = scale * embed_texts(clip, tokenizer, texts) @ embed_images(clip, pixel_values, kept).T
            loss, accuracy = contrastive_loss(logits, matches)
            loss.backward()
            grad_norm = optimizer.step(step)
            step += 1
            mean_loss = running_mean(mean_loss, loss.item())
            mean_accuracy = running_mean(mean_accuracy, accuracy.item())
            progress.update(1, loss=f"{mean_loss:.3f}", accuracy=f"{mean_accuracy:.3f}")
            if step % 20 == 0:
                log.write(step, loss=loss.item(), accuracy=accuracy.item(), grad_norm=grad_norm.item())
            if step % args.checkpointing_steps == 0 or step == args.max_train_steps:
                checkpoints.save_checkpoint(work_dir, step, write, {}, keep=2)
    log.close()
    return clip


def running_mean(mean, value):
    """Return the exponential moving average with weight 1/20, which starts at the first value."""
    return value if mean is None else mean + 0.05 * (value - mean)


def main(args):
    """Train the tokenizer and the CLIP, measure it on held-out pictures, and publish the models."""
    import torch

    from pipelines.loading import set_up_torch

    output_dir, work_dir = Path(args.output_dir), Path(f"{args.output_dir}.work")
    if folders.read_manifest(output_dir):
        return messages.print_result(output_dir=str(output_dir), trained=0)
    set_up_torch("cpu")
    torch.manual_seed(args.seed)
    emoji = pictures.load_pictures(args.cache_dir)
    training, held_out = split_pictures(emoji, args.seed)
    tokenizer = train_tokenizer(corpus(emoji))
    work_dir.mkdir(parents=True, exist_ok=True)
    clip = train(make_clip(tokenizer), tokenizer, Batches(training, args.seed), args, work_dir).eval()
    figures = {"steps": args.max_train_steps, **measure(clip, tokenizer, emoji, held_out, args.seed)}
    with folders.staging(output_dir) as beside:
        save_models(clip, tokenizer, beside)
        (beside / "log.json").write_text(json.dumps(figures))
        folders.publish(beside, output_dir)
    messages.print_result(output_dir=str(output_dir), **figures)


if __name__ == "__main__":
    sys.exit(cli.run(main, parse_args()))
