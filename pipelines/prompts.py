"""Prompts: files of them, and the identifier that names a subject."""

from common.cli import check_text
from common.errors import BadInput


def _words(prompt):
    return [word.strip(".,;:!?\"'()") for word in prompt.lower().split()]


def check_prompts(instance_prompt, class_prompt=None, unique_token=None):
    """Raise BadInput unless the identifier is in the instance prompt and not in the class prompt.

    unique_token: by default the words that the instance prompt has and the class prompt lacks.
    """
    for flag, text in (("--instance_prompt", instance_prompt), ("--class_prompt", class_prompt or "")):
        check_text(flag, text)
    instance, other, token = (_words(text or "") for text in (instance_prompt, class_prompt, unique_token))
    token = token or [word for word in instance if word not in other]
    if not token:
        raise BadInput("--instance_prompt has no word that --class_prompt lacks: add an identifier, say unqtkn")
    for word in token:
        if word not in instance:
            raise BadInput(f"--instance_prompt {instance_prompt!r} lacks the identifier {word!r}: add it")
        if word in other:
            raise BadInput(f"--class_prompt {class_prompt!r} has the identifier {word!r}: leave it out")
