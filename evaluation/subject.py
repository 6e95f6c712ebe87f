"""How prompts name the subject and its class, and prompts with {} for either."""

from pathlib import Path

from common.errors import BadInput, one_line
from pipelines.prompts import check_prompts


def find_subject(instance_prompt, class_prompt, unique_token=None, class_name=None):
    """Return ("unqtkn dog", "dog"): how the prompts name the subject, and its class.

    The identifier is found as check_prompts does, the class is what follows it and stands in the class prompt too.
    """
    check_prompts(instance_prompt, class_prompt, unique_token)
    words = instance_prompt.split()
    plain, others, token = (
        [word.strip(".,;:!?\"'()") for word in text.lower().split()]
        for text in (instance_prompt, class_prompt, unique_token or "")
    )
    places = [i for i, word in enumerate(plain) if word in token or (not token and word not in others)]
    first, end = places[0], places[-1] + 1
    if end - first != len(places):
        differing = ", ".join(words[place] for place in places)
        raise BadInput(f"--instance_prompt has several words that --class_prompt lacks ({differing}): --unique_token")
    last = next((i for i in range(end, len(words)) if plain[i] not in others), len(words))
    class_name = class_name or " ".join(words[end:last]).strip(".,;:!?\"'()")
    if not class_name:
        raise BadInput(f"--instance_prompt {instance_prompt!r} names no class after the identifier: give --class_name")
    return f"{' '.join(words[first:end])} {class_name}", class_name


def read_templates(prompts_file, instance_prompt, subject):
    """Return the prompts with {} for the subject, each once: those of the file, or the instance prompt alone."""
    if not prompts_file:
        if subject not in instance_prompt:
            raise BadInput(f"--instance_prompt {instance_prompt!r} lacks {subject!r}: give --prompts_file")
        return [instance_prompt.replace(subject, "{}", 1)]
    try:
        lines = Path(prompts_file).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--prompts_file {prompts_file}: {error}") from None
    templates = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not templates:
        raise BadInput(f"--prompts_file {prompts_file} holds no prompt")
    for template in templates:
        if "{}" not in template:
            raise BadInput(f"--prompts_file {prompts_file}: {one_line(template, 100)!r} has no {{}} for the subject")
    return templates
