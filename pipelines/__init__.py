"""Diffusers pipelines: model folders as files, loading, drawing. Nothing here trains.

configs       what a model folder says of itself     loading       models and pipelines in memory
tokens        the tokenizer and what it reads        samplers      which scheduler draws, in how many steps
model_folder  whole, damaged, its digest, copies     image_folder  names and records of drawn images
prompts       identifiers, files of prompts          drawing       images on a pool of actors
"""
