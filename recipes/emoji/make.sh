#!/usr/bin/env bash
# Make models/emoji-64 and models/emoji-clip from scratch: recipes/emoji/make.sh runs all steps, or resumes where it
# stopped; recipes/emoji/make.sh 3 runs one step. Takes about six hours on two CPU cores, mostly in steps 2 and 6.
# The committed UNet is the result of several runs, as its card says; step 6 is the last of them, from scratch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

EMOJI_DIR=${EMOJI_DIR:-data/emoji}
MAX_STEPS=${MAX_STEPS:-12000}
NUM_WORKERS=${NUM_WORKERS:-0}
recipe() { .venv/bin/python -m "recipes.emoji.$1" "${@:2}"; }

step_1() { recipe pictures --cache_dir "$EMOJI_DIR"; }
step_2() { recipe train_vae --cache_dir "$EMOJI_DIR" --output_dir "$EMOJI_DIR/vae"; }
step_3() { recipe train_clip --cache_dir "$EMOJI_DIR" --output_dir "$EMOJI_DIR/clip"; }
step_4() {
    recipe assemble --vae_dir "$EMOJI_DIR/vae" --clip_dir "$EMOJI_DIR/clip" --output_dir "$EMOJI_DIR/start"
    recipe make_dataset --cache_dir "$EMOJI_DIR" --output_dir "$EMOJI_DIR/dataset"
}
step_5() {
    .venv/bin/python preprocess.py --input "$EMOJI_DIR/dataset" --model_dir "$EMOJI_DIR/start" \
        --output_dir "$EMOJI_DIR/latents" --num_workers "$NUM_WORKERS"
}
step_6() {
    .venv/bin/python pretrain.py --data "$EMOJI_DIR/latents" --model_dir "$EMOJI_DIR/start" \
        --output_dir "$EMOJI_DIR/base" --max_steps "$MAX_STEPS" --batch_size_per_worker 16 \
        --lr 6e-4 --lr_scheduler cosine --lr_warmup_steps 100 --ema_decay 0.998 --shuffle_window 64 \
        --num_validation_rows 256 --validation_steps 300 --checkpointing_steps 300 --num_workers "$NUM_WORKERS"
}
step_7() {
    recipe export --model_dir "$EMOJI_DIR/base" --cache_dir "$EMOJI_DIR" --vae_dir "$EMOJI_DIR/vae" \
        --clip_dir "$EMOJI_DIR/clip" --output_dir models/emoji-64
    recipe export_clip --clip_dir "$EMOJI_DIR/clip" --output_dir models/emoji-clip
}

case ${1:-all} in
    all) for number in 1 2 3 4 5 6 7; do "step_$number"; done ;;
    [1-7]) "step_$1" ;;
    *)
        echo "make.sh: $1 is not a step: 1 to 7, or none for all" >&2
        exit 2
        ;;
esac
