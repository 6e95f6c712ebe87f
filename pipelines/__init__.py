"""Diffusers pipelines: validate model folders, load them, draw images. No training code.

configs       model_index.json and the configurations of a model's components
tokens        tokenizers: vocabulary checks, token ids, truncated prompts
family        what a family of models is: parts, defaults, methods
families      what differs between Stable Diffusion, SDXL, SD 3 and FLUX: encoders, condition, prediction
conditions    prompts and crops as fields of a batch, and the denoiser's condition from them
objectives    what a denoiser learns: a diffusion or a flow
posteriors    the latent cache of train.py
model_folder  file checks, weight variants, copies and digests of a model folder
loading       load models and pipelines, encode and draw with them
lora          files of LoRAs: read, checked, fused, written for Diffusers and web UIs
names         names of modules and weights in files, also those of Stable Diffusion's original code
single_file   a whole model as one file of other programs, written and read
samplers      sampler flags and the scheduler that a pipeline draws with
prompts       files of prompts, subject identifiers
subjects      subjects to learn, each with its class
captions      captions of single images
image_folder  file names and metadata.jsonl of generated images
drawing       draw images on a pool of actors
hub           models of the Hugging Face Hub and its local cache
upload        upload a pipeline to the Hugging Face Hub
"""
