"""What a tuned model learned and forgot: embeddings, measures of them, and the report.

encoders  CLIP and DINO: found, checked, run      subject            the subject's name in prompts
measures  numbers and intervals of embeddings     report(.html.jinja)  the page
"""
