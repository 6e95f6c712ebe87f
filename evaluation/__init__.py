"""Evaluation of a tuned model beside its base model: checks, images, embeddings, measures and the report.

subject   names of the subject and its class in prompts
checks    whether the models, images and prompts can be compared
pictures  draws the sets of images, embeds them and measures them
encoders  CLIP and DINO: finds, checks and runs them
sending   sends the encoders' files to the nodes of a cluster
measures  measures of embeddings, with bootstrap confidence intervals
report    the page report.html, from report.html.jinja
"""
