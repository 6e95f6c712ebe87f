#!/usr/bin/env bash
# DreamBooth in numbered steps. ./run.sh runs all steps, ./run.sh 3 runs one, ./run.sh test runs the tests.
#   0 set up   1 copy the subject's photos   2 cache the model   3 draw class images   4 fine-tune   5 draw the subject
#   6 measure what the model learned and forgot
# A finished step is not repeated. Every variable below can be set as an environment variable:
#   INSTANCE_DIR=~/photos/rex CLASS_NAME=dog ORIG_MODEL_NAME=CompVis/stable-diffusion-v1-4 ./run.sh
# ./run.sh settings prints their values and runs nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# The subject: a folder of about five photos, its class in one or two words, and a rare token as its identifier.
INSTANCE_DIR=${INSTANCE_DIR:-assets/subject}
CLASS_NAME=${CLASS_NAME:-cat}
UNIQUE_TOKEN=${UNIQUE_TOKEN:-unqtkn}

# The base model: a local folder, or a name on the Hugging Face Hub and a commit. `main` means the commit that was the
# newest one when the model was first downloaded to ORIG_MODEL_DIR.
ORIG_MODEL_NAME=${ORIG_MODEL_NAME:-models/emoji-64}
if [[ $ORIG_MODEL_NAME == CompVis/stable-diffusion-v1-4 ]]; then
    ORIG_MODEL_HASH=${ORIG_MODEL_HASH:-b95be7d6f134c3a9e62ee616f310733567f069ce}
else
    ORIG_MODEL_HASH=${ORIG_MODEL_HASH:-main}
fi

inside() { # print the location of $2 in folder $1; the options of a URI, such as ?region=eu-west-1, stay at its end
    local options=
    if [[ $1 == *://*\?* ]]; then
        options=\?${1#*\?}
    fi
    printf '%s' "${1%"$options"}/$2$options"
}

shown() { # print a location without the secrets in its options
    sed -E 's/([?&](access_key|secret_key|session_token|access_token)=)[^&]*/\1***/g' <<<"$1"
}

# Output folders, or URIs in an object store: DATA_PREFIX=s3://bucket/rex
DATA_PREFIX=${DATA_PREFIX:-data}
ORIG_MODEL_DIR=${ORIG_MODEL_DIR:-$(inside "$DATA_PREFIX" model-orig)}
TUNED_MODEL_DIR=${TUNED_MODEL_DIR:-$(inside "$DATA_PREFIX" model-tuned)}
IMAGES_OWN_DIR=${IMAGES_OWN_DIR:-$(inside "$DATA_PREFIX" images-own)}
IMAGES_REG_DIR=${IMAGES_REG_DIR:-$(inside "$DATA_PREFIX" images-reg)}
IMAGES_NEW_DIR=${IMAGES_NEW_DIR:-$(inside "$DATA_PREFIX" images-new)}
EVALUATION_DIR=${EVALUATION_DIR:-$(inside "$DATA_PREFIX" evaluation)}

# The rank of a LoRA, such as 16, to train in place of all weights: a file of some megabytes. Empty: all weights.
LORA=${LORA:-}

# Settings: those of the DreamBooth paper; an empty one is the model's own, as the scripts know it. The embedded 64-pixel
# model learns faster.
if [[ $ORIG_MODEL_NAME -ef models/emoji-64 ]]; then
    PROMPT_START=${PROMPT_START:-a 3d emoji of a}
    NUM_CLASS_IMAGES=${NUM_CLASS_IMAGES:-50}
    NUM_EVALUATION_IMAGES=${NUM_EVALUATION_IMAGES:-2}
    NUM_INFERENCE_STEPS=${NUM_INFERENCE_STEPS:-25}
    GUIDANCE_SCALE=${GUIDANCE_SCALE:-3}
    LR=${LR:-${LORA:+2e-3}}
    LR=${LR:-1e-4}
    NUM_TRAIN_PAIRS=${NUM_TRAIN_PAIRS:-600}
    RANDOM_FLIP=${RANDOM_FLIP:---no-random_flip} # the example subject has one orange ear, and its tail is on one side
    CLIP_MODEL=${CLIP_MODEL:-models/emoji-clip}
    DINO_MODEL=${DINO_MODEL:-none}
    PROMPTS_FILE=${PROMPTS_FILE:-prompts/emoji.txt}
else
    PROMPT_START=${PROMPT_START:-photo of a}
    NUM_CLASS_IMAGES=${NUM_CLASS_IMAGES:-200}
    NUM_EVALUATION_IMAGES=${NUM_EVALUATION_IMAGES:-4} # of each prompt
    NUM_INFERENCE_STEPS=${NUM_INFERENCE_STEPS:-}
    GUIDANCE_SCALE=${GUIDANCE_SCALE:-}
    LR=${LR:-}
    NUM_TRAIN_PAIRS=${NUM_TRAIN_PAIRS:-800} # on one worker as many steps, on eight workers an eighth of the steps
    RANDOM_FLIP=${RANDOM_FLIP:---random_flip}
    CLIP_MODEL=${CLIP_MODEL:-openai/clip-vit-base-patch32}
    DINO_MODEL=${DINO_MODEL:-facebook/dino-vits16}
    PROMPTS_FILE=${PROMPTS_FILE:-prompts/living.txt} # for an object instead of a pet: prompts/objects.txt
fi
SAMPLER=(${NUM_INFERENCE_STEPS:+--num_inference_steps "$NUM_INFERENCE_STEPS"}
    ${GUIDANCE_SCALE:+--guidance_scale "$GUIDANCE_SCALE"})
MAX_TRAIN_STEPS=${MAX_TRAIN_STEPS:-} # if it is set, it overrides NUM_TRAIN_PAIRS
PRIOR_LOSS_WEIGHT=${PRIOR_LOSS_WEIGHT:-1}
NUM_WORKERS=${NUM_WORKERS:-} # empty: the default of each script
WORKERS=(${NUM_WORKERS:+--num_workers "$NUM_WORKERS"})
BATCH_SIZE=${BATCH_SIZE:-10} # images drawn at a time
TRAIN_FLAGS=${TRAIN_FLAGS:-} # more flags for train.py: "--use_8bit_adam --validation_prompts 'a cat on a red mat'"
DRAW_FLAGS=${DRAW_FLAGS:-}   # more flags for run_model.py and evaluate.py: "--no_safety_checker --sampler dpm++"

CLASS_PROMPT="$PROMPT_START $CLASS_NAME"
INSTANCE_PROMPT="$PROMPT_START $UNIQUE_TOKEN $CLASS_NAME"

words() { # print the words of variable $1, one per line: quotes keep spaces in a word, nothing is expanded or executed
    xargs -r -n 1 printf '%s\n' <<<"${!1}" 2>/dev/null
}
for name in TRAIN_FLAGS DRAW_FLAGS; do
    if ! words "$name" >/dev/null; then
        echo "run.sh: $name=${!name} cannot be split into words: close its quotes, on one line" >&2
        exit 2
    fi
done
mapfile -t TRAIN_WORDS < <(words TRAIN_FLAGS)
mapfile -t DRAW_WORDS < <(words DRAW_FLAGS)

settings() { # print every variable above, quoted for the shell
    local name names=(INSTANCE_DIR CLASS_NAME UNIQUE_TOKEN ORIG_MODEL_NAME ORIG_MODEL_HASH DATA_PREFIX ORIG_MODEL_DIR
        TUNED_MODEL_DIR IMAGES_OWN_DIR IMAGES_REG_DIR IMAGES_NEW_DIR EVALUATION_DIR PROMPT_START CLASS_PROMPT
        INSTANCE_PROMPT NUM_CLASS_IMAGES NUM_EVALUATION_IMAGES NUM_INFERENCE_STEPS GUIDANCE_SCALE LR NUM_TRAIN_PAIRS
        MAX_TRAIN_STEPS LORA RANDOM_FLIP CLIP_MODEL DINO_MODEL PROMPTS_FILE PRIOR_LOSS_WEIGHT NUM_WORKERS BATCH_SIZE
        TRAIN_FLAGS DRAW_FLAGS)
    for name in "${names[@]}"; do
        printf '%s=%q\n' "$name" "${!name}"
    done
}

step_0() { # set up: a virtual environment with the packages of requirements.txt
    local file=${1:-requirements.txt} stamp
    stamp=.venv/${file%.txt}.sha256
    if ! sha256sum --check --status "$stamp" 2>/dev/null; then
        "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
        "${PYTHON:-python3}" -m venv .venv
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$file"
        sha256sum requirements*.txt >"$stamp"
    fi
}

step_1() { # copy the subject's photos; photos of another subject in the folder are an error
    .venv/bin/python copy_photos.py --instance_images_dir "$INSTANCE_DIR" --output_dir "$IMAGES_OWN_DIR"
}

step_2() { # cache the model; the other steps use the path of the cached snapshot
    ORIG_MODEL_PATH=$(.venv/bin/python cache_model.py \
        --model_name "$ORIG_MODEL_NAME" --model_dir "$ORIG_MODEL_DIR" \
        --revision "$ORIG_MODEL_HASH" --keep_revision | tail -n 1)
}

step_3() { # draw class images with the base model
    step_2
    .venv/bin/python run_model.py \
        --model_dir "$ORIG_MODEL_PATH" \
        --output_dir "$IMAGES_REG_DIR" \
        --prompts "$CLASS_PROMPT" \
        --num_samples_per_prompt "$NUM_CLASS_IMAGES" \
        "${SAMPLER[@]}" \
        --batch_size "$BATCH_SIZE" \
        "${WORKERS[@]}" \
        "${DRAW_WORDS[@]}"
}

train() { # run train.py on the class images; more flags may follow
    local length=(--max_train_pairs "$NUM_TRAIN_PAIRS")
    if [[ $MAX_TRAIN_STEPS ]]; then
        length=(--max_train_steps "$MAX_TRAIN_STEPS")
    fi
    if [[ " ${TRAIN_WORDS[*]}" == *" --max_train_"* ]]; then # TRAIN_FLAGS sets the length
        length=()
    fi
    .venv/bin/python train.py \
        --model_dir "$ORIG_MODEL_PATH" \
        --output_dir "$TUNED_MODEL_DIR" \
        --instance_images_dir "$IMAGES_OWN_DIR" \
        --instance_prompt "$INSTANCE_PROMPT" \
        --class_images_dir "$IMAGES_REG_DIR" \
        --class_prompt "$CLASS_PROMPT" \
        --unique_token "$UNIQUE_TOKEN" \
        ${LR:+--lr "$LR"} \
        ${LORA:+--lora "$LORA"} \
        --prior_loss_weight "$PRIOR_LOSS_WEIGHT" \
        "${length[@]}" \
        "$RANDOM_FLIP" \
        --validation_prompts "$INSTANCE_PROMPT" \
        --validation_prompts "$CLASS_PROMPT" \
        ${GUIDANCE_SCALE:+--guidance_scale "$GUIDANCE_SCALE"} \
        "${WORKERS[@]}" \
        "${TRAIN_WORDS[@]}" \
        "$@"
}

check_training() { # end before hours of step 3 if step 4 would refuse its flags; the photos stand for the class images
    if [[ ! -e $TUNED_MODEL_DIR ]]; then
        train --dry_run --overwrite --class_images_dir "$IMAGES_OWN_DIR" --num_workers 0 \
            --train_batch_size 1 --gradient_accumulation_steps 1 >/dev/null
    fi
}

step_4() { # fine-tune the text encoder and the UNet
    step_2
    train
    echo "The validation images are in $(shown "$(inside "$TUNED_MODEL_DIR" validation/strip.png)")" >&2
}

tuned() { # set TUNED to the flags of the tuned model: a pipeline, or the base model with a LoRA
    TUNED=(--model_dir "$TUNED_MODEL_DIR")
    if [[ $LORA ]]; then
        step_2
        TUNED=(--model_dir "$ORIG_MODEL_PATH" --lora "$TUNED_MODEL_DIR")
    fi
}

step_5() { # draw the subject
    tuned
    .venv/bin/python run_model.py \
        "${TUNED[@]}" \
        --output_dir "$IMAGES_NEW_DIR" \
        --prompts "$INSTANCE_PROMPT" \
        --prompts "$INSTANCE_PROMPT on a red background" \
        --prompts "$INSTANCE_PROMPT on a blue background" \
        --num_samples_per_prompt 5 \
        "${SAMPLER[@]}" \
        --batch_size "$BATCH_SIZE" \
        "${WORKERS[@]}" \
        "${DRAW_WORDS[@]}"
    echo "The images are in $(shown "$IMAGES_NEW_DIR")" >&2
}

step_6() { # measure what the model learned and forgot, and write a report
    step_2
    tuned
    .venv/bin/python evaluate.py \
        "${TUNED[@]}" \
        --base_model_dir "$ORIG_MODEL_PATH" \
        --output_dir "$EVALUATION_DIR" \
        --instance_images_dir "$IMAGES_OWN_DIR" \
        --class_images_dir "$IMAGES_REG_DIR" \
        --instance_prompt "$INSTANCE_PROMPT" \
        --class_prompt "$CLASS_PROMPT" \
        --unique_token "$UNIQUE_TOKEN" \
        --class_name "$CLASS_NAME" \
        --prompts_file "$PROMPTS_FILE" \
        --num_samples_per_prompt "$NUM_EVALUATION_IMAGES" \
        --clip_model "$CLIP_MODEL" \
        --dino_model "$DINO_MODEL" \
        "${SAMPLER[@]}" \
        --batch_size "$BATCH_SIZE" \
        "${WORKERS[@]}" \
        "${DRAW_WORDS[@]}"
    echo "The report is $(shown "$(inside "$EVALUATION_DIR" report.html)")" >&2
}

run_step() {
    local names=("set-up" "the subject's photos" "the base model" "class images" "fine-tuning" "images of the subject"
        "evaluation")
    echo "== step $1: ${names[$1]}" >&2
    "step_$1"
}

case ${1:-all} in
    all)
        for step in 0 1 2; do run_step "$step"; done
        check_training
        for step in 3 4 5 6; do run_step "$step"; done
        ;;
    [0-6]) run_step "$1" ;;
    settings) settings ;;
    test)
        step_0 requirements-test.txt
        .venv/bin/python -m pytest "${@:2}"
        ;;
    *)
        echo "run.sh: $1 is not a step: ./run.sh, ./run.sh 0 to 6, ./run.sh settings, or ./run.sh test" >&2
        exit 2
        ;;
esac
